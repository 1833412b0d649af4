"""DAPO's dynamic sampling, by hand."""

from __future__ import annotations

from typing import Any

from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.testing import make_trainer

FIRST, SECOND, THIRD = [LIVE, DEAD, DEAD], [HALF, DEAD], [LIVE]


def test_dead_groups_are_generated_again_until_all_are_live(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(FIRST, SECOND, THIRD), max_steps=1, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="dapo", replay_refill="same(rounds=10)")
    steps = record(session)
    trainer.train()
    ((_, after),) = steps
    ups = (after["advantages"].view(3, 4) > 0).sum(dim=1)
    assert ups.tolist() == [1, 2, 1], "each slot's first live group"
    assert session.metrics["replay/rounds"] == 2
    assert session.metrics["replay/rollouts"] == 12 + 8 + 4
