"""Advantages of a plugin's own, with running state and without a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from methods import SCRIPT, SIZE, ZScore
from replaying import Checked, Watch
from support import Rewards

import trl_replay
from trl_replay.testing import make_trainer


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    trl_replay.register(ZScore(), "zscore")
    yield
    trl_replay.unregister("zscore")


def test_a_running_z_score_needs_no_buffer(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, trainer_class=Checked)
    session = trl_replay.attach(trainer, replay_plugins=["zscore"], replay_buffer_size=0)
    assert session.enabled
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    seen: list[float] = []
    for step, (before, after) in enumerate(watch.steps):
        rewards = watch.rewards[step][:, 0].tolist()
        if not seen:
            assert torch.equal(after["advantages"], before["advantages"]), "TRL's own, bit for bit"
        else:
            mean = sum(seen) / len(seen)
            spread = np.sqrt(sum((value - mean) ** 2 for value in seen) / len(seen))
            expected = torch.tensor([(reward - mean) / (spread + 1e-4) for reward in rewards], dtype=torch.float32)
            torch.testing.assert_close(after["advantages"], expected, rtol=1e-5, atol=1e-6)
        seen += rewards
    assert session.metrics["replay/dead_fraction"] == 0.0, "equal advantages that are not 0 teach something"
    assert len(session.buffer) == 0
    assert session.totals.counters["stored"] == 0
