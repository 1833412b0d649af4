from __future__ import annotations
from typing import Any
import pytest
import trl_replay
from real_unsloth import trainer_of
from replaying import replay
from support import DEAD, HALF, LIVE, Rewards

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])

def test_one(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, Rewards(*SCRIPT), learning_rate=2e-2)
    session, watch = replay(trainer)
    print(trainer.compared, trainer.gradient_errors)
