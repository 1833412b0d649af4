"""RLOO: its advantages, loss, and gradient by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from methods import MOST, SIZE, train
from replaying import Checked, Watch
from support import DEAD, HALF, LIVE

from trl_replay.testing import make_context, make_groups, make_table
from trl_replay_papers.rloo import trl_replay_advantages


class Compared(Checked):
    """Gradients too."""

    gradients = True


def advantages(watch: Watch, step: int) -> torch.Tensor:
    """`(B,)`: RLOO's of fresh rows, and of stored ones as they were generated."""
    whole = [
        [reward - (sum(group) - reward) / (SIZE - 1) for group in rewards.view(-1, SIZE).tolist() for reward in group]
        for rewards in watch.rewards
    ]
    found = whole[step].copy()
    for row, stored in watch.taken[step].items():
        origin, source = watch.source(*stored)
        found[row] = whole[origin][source]
    return torch.tensor(found)


def test_a_reward_counts_by_how_far_it_is_from_the_others(tmp_path: Any) -> None:
    """With a buffer, from which groups come back with the advantages that they were stored with."""
    session, watch = train(
        tmp_path,
        advantages,
        {"replay_preset": "rloo", "replay_buffer_size": 8, "replay_start": 0},
        script=([LIVE, HALF, MOST], [MOST, [1.0] * 4, LIVE], [DEAD, MOST, HALF]),
        trainer_class=Compared,
        loss_type="dr_grpo",
        max_steps=3,
    )
    shaped = watch.steps[0][1]["advantages"][:4].tolist()
    assert np.allclose(shaped, [1.0, -1 / 3, -1 / 3, -1 / 3])
    assert len(watch.trainer.gradient_errors) == 3
    assert max(watch.trainer.gradient_errors) < 1e-4
    assert session.totals.counters["replaced"] == 2


def test_a_row_without_a_reward_is_in_no_baseline_and_one_alone_has_none() -> None:
    nan = float("nan")
    groups = make_groups([[1.0, 0.5, nan, 0.0], [1.0, nan, nan, nan]])
    shaped = trl_replay_advantages(groups, make_context(make_table([])))
    assert np.array_equal(shaped[0], [0.75, 0.0, groups.advantages[0, 2], -0.75], equal_nan=True)
    assert np.array_equal(shaped[1], groups.advantages[1], equal_nan=True)
