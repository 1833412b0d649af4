"""Sign advantages, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import DEAD, HALF, Rewards, Spy, record

import trl_replay
from trl_replay.testing import make_context, make_groups, make_table, make_trainer
from trl_replay_papers.sign_advantage import SignAdvantage


def test_every_row_trains_on_the_sign_of_its_own_reward(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([DEAD, [1.0] * 4, HALF]), max_steps=2, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="sign_advantage")
    steps = record(session)
    trainer.train()
    for _, after in steps:
        assert after["advantages"].tolist() == [-1.0] * 4 + [1.0] * 4 + [1.0, 1.0, -1.0, -1.0]
    assert session.metrics["replay/dead_fraction"] == 0.0


def test_a_row_without_a_reward_keeps_its_advantage() -> None:
    groups = make_groups([[1.0, 0.2, float("nan"), 0.0]])
    shaped = SignAdvantage(pass_reward=0.2).trl_replay_advantages(groups, make_context(make_table([])))
    assert np.array_equal(shaped[0], [1.0, 1.0, groups.advantages[0, 2], -1.0], equal_nan=True)
