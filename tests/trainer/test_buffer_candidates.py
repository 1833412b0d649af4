"""Candidates: how their log-probs are kept."""

from __future__ import annotations

from pathlib import Path

import torch
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer


def test_log_probs_in_bfloat16_take_half_the_room_and_err_by_less_than_what_is_documented(tmp_path: Path) -> None:
    held = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=1, learning_rate=0.0)
        session = trl_replay.attach(trainer, replay_logps_dtype=dtype)
        trainer.train()
        held[dtype] = [session.buffer.load(serial) for serial in session.buffer.held()]
    assert held["float32"]
    for full, half in zip(held["float32"], held["bfloat16"], strict=True):
        logps, rounded = full.tensors["old_per_token_logps"], half.tensors["old_per_token_logps"]
        assert rounded.dtype == torch.bfloat16
        assert full.nbytes - half.nbytes == 2 * logps.numel()
        assert bool(((rounded.float() - logps).abs() <= 2.0**-8 * logps.abs()).all())
