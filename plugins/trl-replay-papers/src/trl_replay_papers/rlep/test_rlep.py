"""RLEP: a pool that never changes, two successes a prompt, and their advantages, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.loss.supply import ROWS
from trl_replay.setup.assembly import made_up_groups
from trl_replay.testing import make_context, make_table, make_trainer
from trl_replay_papers.rlep import make_successes

SIZE = 4
SUCCESSES = {"1=": ["11", "12", "13"], "12=": ["21"], "123+4=": ["31", "32"]}
SCRIPT = ([DEAD, LIVE, LIVE], [LIVE, DEAD, HALF], [HALF, LIVE, DEAD])


def write_pool(path: Path) -> None:
    """Groups of four with one to three successes, as another run left them."""
    lines = []
    for prompt, right in SUCCESSES.items():
        for completion in [*right, "7", "8", "9"][:SIZE]:
            row = {"prompt": prompt, "completion": completion, "reward": float(completion in right)}
            lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


def test_two_successes_of_a_pool_that_never_changes_stand_beside_the_better_fresh_rows(tmp_path: Any) -> None:
    write_pool(tmp_path / "pool.jsonl")
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3, trainer_class=Spy)
    settings = {"replay_preset": "rlep", "replay_warm_start": str(tmp_path / "pool.jsonl")}
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    tokenizer = trainer.processing_class
    assert not (steps[0][1][ROWS][:, 0] < 0).any(), "not before the first loss"
    for rewards, (_, after) in zip(SCRIPT[1:], steps[1:], strict=True):
        replayed = after[ROWS][:, 0] < 0
        for slot, right in enumerate(SUCCESSES.values()):
            rows = slice(slot * SIZE, (slot + 1) * SIZE)
            places = replayed[rows].nonzero().flatten().tolist()
            would_all_pass = sum(rewards[slot]) + min(2, len(right)) == SIZE  # which would teach nothing
            assert len(places) == (0 if would_all_pass else min(2, len(right)))
            masks = after["completion_mask"][rows].bool()
            texts = {tokenizer.decode(after["completion_ids"][rows][place][masks[place]][:2]) for place in places}
            assert len(texts) == len(places), "no success twice"
            assert texts <= set(right)
            joint = torch.tensor([1.0 if row in places else reward for row, reward in enumerate(rewards[slot])])
            expected = (joint - joint.mean()) / (joint.std() + 1e-4)
            torch.testing.assert_close(after["advantages"][rows], expected)
            left = [reward for row, reward in enumerate(rewards[slot]) if row not in places]
            assert max((rewards[slot][place] for place in places), default=0.0) <= min(left), "for the worst rows"
    assert len(session.buffer) == 3, "what the run generated is not stored"


@pytest.mark.parametrize("name", ["rlep", "luffy"])
def test_a_run_that_resumes_with_it_takes_the_pool_in(tmp_path: Any, name: str) -> None:
    write_pool(tmp_path / "pool.jsonl")
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, Rewards([DEAD, DEAD, DEAD]), **saves)
    trl_replay.attach(trainer, replay_preset="popo")
    trainer.train()
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=6, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset=name, replay_warm_start=str(tmp_path / "pool.jsonl"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert session.buffer.table.origin.tolist() == [2, 2, 2]
    assert session.totals.counters["replaced"] > 0


def test_136_of_fresh_rows_that_the_function_does_not_score_the_worst_by_the_sum_leave() -> None:
    table = make_table([1.0])
    slots = made_up_groups(np.array([[[np.nan, 0.4], [np.nan, 0.1], [np.nan, 0.3], [np.nan, 0.2]]]))
    taken = make_successes()(table, np.array([[0]]), replace(slots, counting=0), make_context(table))
    assert taken.tolist() == [[-1, 0, -1, -1]]
