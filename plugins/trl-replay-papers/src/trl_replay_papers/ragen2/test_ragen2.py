"""RAGEN-2: which groups train, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import SIZE
from support import DEAD, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.loss.supply import EXCLUDED, ROWS
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_groups, make_table, make_trainer
from trl_replay_papers.ragen2 import Ragen2

LITTLE = [0.5, 0.5, 0.5, 0.6]


def test_the_fewest_groups_are_kept_that_hold_the_share() -> None:
    rewards = [[0.0, 1.0], [0.0, 0.5], [0.5, 0.5], [0.0, 0.1]]  # variances in the ratio of 100, 25, 0 and 1
    groups = make_groups(rewards)
    for share, expected in ((0.9, [0, 1]), (0.79, [0]), (1.0, [0, 1, 3])):
        shaped = Ragen2(share).trl_replay_advantages(groups, make_context(make_table([])))
        kept = np.isfinite(shaped).all(axis=1)
        assert np.flatnonzero(kept).tolist() == expected
        assert (shaped[kept] == groups.advantages[kept]).all()


def test_the_others_train_nothing_and_count_nowhere(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, LITTLE, DEAD]), max_steps=2, trainer_class=Spy)
    steps = record(trl_replay.attach(trainer, replay_preset="ragen2"))
    trainer.train()
    for before, after in steps:
        left_out = (after[ROWS][:, 1] & EXCLUDED).bool().tolist()
        assert left_out == [False] * SIZE + [True] * 2 * SIZE
        assert after["advantages"][:SIZE].tolist() == before["advantages"][:SIZE].tolist()
        tokens = int(after["completion_mask"][:SIZE].sum())
        assert int(after["num_items_in_batch"]) == tokens
    assert np.isfinite([float(loss["loss"]) for loss in trainer.losses]).all()


@pytest.mark.parametrize("p", [0.0, 1.5, "all"])
def test_a_share_that_can_not_be_used_is_refused(p: Any) -> None:
    with pytest.raises(ConfigurationError, match="p="):
        Ragen2(p)


def test_141_ragen2_that_is_made_anew_keeps_its_share() -> None:
    trl_replay.register(Ragen2(0.3), "mine")
    try:
        made = registry().with_arguments({"mine": {}}).plugin("mine", "replay_plugins").object
    finally:
        trl_replay.unregister("mine")
    assert made.p == 0.3
