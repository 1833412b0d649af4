"""Advantages of dead groups, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support import DEAD, HALF, Rewards, Spy, record

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.testing import make_trainer
from trl_replay_papers.rl_zvp import RlZvp


def test_groups_that_all_passed_go_up_and_groups_that_all_failed_go_down(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([DEAD, [1.0] * 4, HALF]), max_steps=2, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="rl_zvp")
    steps = record(session)
    trainer.train()
    for before, after in steps:
        shaped = after["advantages"].tolist()
        assert shaped[:8] == pytest.approx([-0.1] * 4 + [0.1] * 4)
        assert shaped[8:] == before["advantages"].tolist()[8:], "TRL's own, bit for bit"
    assert session.metrics["replay/dead_fraction"] == 0.0


def test_a_size_that_can_not_be_used_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="alpha=0"):
        RlZvp(alpha=0)
