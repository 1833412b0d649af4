"""LUFFY: the trace in each group, its place, its advantages and its weight, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support import DEAD, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_trainer

PROMPTS = ("1=", "12=", "123+4=")
SIZE = 4


def test_luffy_trains_on_one_trace_of_the_prompt_beside_the_fresh_rows(tmp_path: Any) -> None:
    file = tmp_path / "traces.jsonl"
    traces = [{"prompt": prompt, "completion": "12", "reward": 1.0} for prompt in PROMPTS]
    file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    script = [[DEAD, LIVE, LIVE], [LIVE, DEAD, DEAD]]
    settings = {"max_steps": 2, "trainer_class": Spy, "scale_rewards": "none", "loss_type": "dr_grpo"}
    trainer = make_trainer(tmp_path, Rewards(*script), **settings)
    session = trl_replay.attach(trainer, replay_preset="luffy", replay_warm_start=str(file))
    steps = record(session)
    trainer.train()
    trace = trainer.processing_class("12")["input_ids"]
    assert not (steps[0][1][ROWS][:, 0] < 0).any(), "not before the first loss"
    for rewards, (_, after) in zip(script[1:], steps[1:], strict=True):
        ids = after["completion_ids"] * after["completion_mask"]
        replayed = after[ROWS][:, 0] < 0
        for slot in range(3):
            rows = slice(slot * SIZE, (slot + 1) * SIZE)
            assert int(replayed[rows].sum()) == 1, "one trace a group"
            (place,) = replayed[rows].nonzero().flatten().tolist()
            assert rewards[slot][place] == min(rewards[slot]), "in the place of a row that failed"
            assert ids[rows][place, : len(trace)].tolist() == trace
            joint = torch.tensor([1.0 if row == place else reward for row, reward in enumerate(rewards[slot])])
            torch.testing.assert_close(after["advantages"][rows], joint - joint.mean())
    assert len(session.buffer) == 3, "traces only"
    assert "x a group was refused: the scorer rlep/pool stores none like it (NaN)" in session.explain()


def test_it_says_why_a_slot_gets_no_trace(tmp_path: Any) -> None:
    """One prompt has a trace; it comes twice in every batch, and another without a trace once."""
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"prompt": "1=", "completion": "12", "reward": 1.0}) + "\n")
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3), ("1=", "1=", "12="), max_steps=3)
    session = trl_replay.attach(trainer, replay_preset="luffy", replay_warm_start=str(file))
    trainer.train()
    told = session.explain()
    assert "2 x a slot's prompt has no further group: each is replayed once a batch" in told
    assert "2 x no group of a slot's prompt can be replayed" in told


def test_its_weight_is_the_slope_of_the_shaped_ratio(tmp_path: Any) -> None:
    from trl_replay.data.types import ReplayedRows
    from trl_replay.registry import registry
    from trl_replay.testing import make_context, make_table
    from trl_replay_papers.luffy import SETTINGS

    correct = registry().resolve("correction", *Named.read(SETTINGS["replay_correction"])).make()
    behavior = torch.zeros(1, 3)  # a teacher whose probabilities count as 1
    logps = torch.tensor([[0.5, 0.1, 0.01]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    ages = torch.zeros(1, dtype=torch.int64)
    rows = ReplayedRows(logps, behavior, logps, mask, torch.ones(1), ages)
    weights = correct(rows, make_context(make_table([]))).weights
    assert weights[0].tolist() == pytest.approx([0.1 * p / (p + 0.1) ** 2 for p in (0.5, 0.1, 0.01)])
