"""Strategies through the real trainer, defaults included; tests/unit/test_strategies.py has every mix of them."""

from __future__ import annotations

from typing import Any

import pytest
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer

KINDS = ("scorer", "evictor", "sampler", "correction")
MIX: list[tuple[str, ...]] = [
    (),
    ("pass_rate", "heap", "uniform", "none"),
    ("reward_std", "reservoir", "proportional", "ratio"),
    ("recency", "fifo", "newest", "none"),
    ("constant", "reservoir", "top", "ratio"),
    ("mean_reward", "prompt_balanced", "prompt_balanced", "none"),
]
"""Of each kind, what is used; the first has every default."""
LIMITS = {"replay_max_age": 3, "replay_max_uses": 2, "replay_max_fraction": 0.7}


@pytest.mark.parametrize("names", MIX, ids=lambda names: "-".join(names) or "defaults")
def test_strategies_train_and_replay_within_the_limits(tmp_path: Any, names: tuple[str, ...]) -> None:
    rewards = Rewards([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD])
    trainer = make_trainer(tmp_path, rewards, max_steps=4, max_completion_length=2)
    chosen = {f"replay_{kind}": name for kind, name in zip(KINDS, names, strict=False)}
    session = trl_replay.attach(trainer, replay_buffer_size=2, **chosen, **LIMITS)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    assert len(session.buffer) <= 2
    assert int(session.buffer.table.uses.max(initial=0)) <= 2
