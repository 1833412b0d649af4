"""Filtering: dead groups count nowhere, by hand."""

from __future__ import annotations

from typing import Any

from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.loss.supply import EXCLUDED, ROWS
from trl_replay.testing import make_trainer


def test_dead_groups_are_left_out_of_the_loss_and_of_its_denominator(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF]), max_steps=2, trainer_class=Spy)
    steps = record(trl_replay.attach(trainer, replay_preset="filter"))
    trainer.train()
    for before, after in steps:
        assert (after[ROWS][:, 1] & EXCLUDED).bool().tolist() == [False] * 4 + [True] * 4 + [False] * 4
        tokens = before["completion_mask"].sum(dim=1)
        assert int(after["num_items_in_batch"]) == int(tokens.sum() - tokens[4:8].sum())
