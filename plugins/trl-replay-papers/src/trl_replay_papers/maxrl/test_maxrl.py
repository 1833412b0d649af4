"""MaxRL: its advantages, loss, and gradient by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from methods import MOST, maxrl_advantages, train
from replaying import Checked
from support import DEAD, HALF, LIVE

from trl_replay.testing import make_context, make_groups, make_table
from trl_replay_papers.maxrl import MaxRL


class Compared(Checked):
    """Gradients too."""

    gradients = True


def test_a_success_counts_the_more_the_fewer_there_are(tmp_path: Any) -> None:
    """With a buffer, from which groups come back with the advantages that they were stored with."""
    session, watch = train(
        tmp_path,
        maxrl_advantages,
        {"replay_preset": "maxrl", "replay_buffer_size": 8, "replay_start": 0},
        script=([LIVE, HALF, MOST], [MOST, [1.0] * 4, LIVE], [DEAD, MOST, HALF]),
        trainer_class=Compared,
        loss_type="dr_grpo",
        max_steps=3,
    )
    shaped = watch.steps[0][1]["advantages"].tolist()
    assert shaped == [3.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0, *[np.float32(1 / 3)] * 3, -1.0]
    assert len(watch.trainer.gradient_errors) == 3
    assert max(watch.trainer.gradient_errors) < 1e-4
    assert session.totals.counters["replaced"] == 2, "of a group without a success, and of one without a failure"


def test_rows_without_a_reward_are_not_counted() -> None:
    groups = make_groups([[1.0, 0.2, float("nan"), 0.0]])
    shaped = MaxRL(pass_reward=0.2).trl_replay_advantages(groups, make_context(make_table([])))
    assert np.array_equal(shaped[0], [0.5, 0.5, groups.advantages[0, 2], -1.0], equal_nan=True)
