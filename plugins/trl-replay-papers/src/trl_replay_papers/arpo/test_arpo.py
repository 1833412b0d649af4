"""ARPO: where a success is put, and what it trains on, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from methods import DEAD, SIZE, fresh, mixed_slots, same_prompt, stored, train
from support import Rewards, record

import trl_replay
from trl_replay.testing import make_trainer


def test_arpo_puts_one_success_where_all_failed_and_nowhere_else(tmp_path: Any) -> None:
    _, watch = train(tmp_path, "joint", {"replay_preset": "arpo"})
    found = {(step, slot): rows for step, slot, rows in mixed_slots(watch)}
    assert len(found) > 3
    for (step, slot), rows in found.items():
        assert fresh(watch, step, slot) == DEAD
        ((serial, row),) = rows.values()
        assert stored(watch, serial, row) == 1.0
        assert same_prompt(watch, step, slot, serial)
    for step, (_, after) in enumerate(watch.steps):
        for slot in range(3):
            if fresh(watch, step, slot) == DEAD and (step, slot) in found:
                advantages = after["advantages"][slot * SIZE : (slot + 1) * SIZE]
                assert float(advantages.max()) == pytest.approx(0.75 / (0.5 + 1e-4)), "one success of four"


def test_136_a_row_that_the_function_does_not_score_is_no_success(tmp_path: Any) -> None:
    nothing, right = Rewards([DEAD] * 3), Rewards([[None, None, 0.0, 1.0]] * 3, [DEAD] * 3)
    nothing.__name__, right.__name__ = "nothing", "accuracy"
    trainer = make_trainer(tmp_path, [nothing, right], max_steps=4)
    session = trl_replay.attach(trainer, replay_preset="arpo", replay_reward="accuracy")
    steps = record(session)
    trainer.train()
    assert session.totals.counters["replaced"] == 9
    for _, after in steps[1:]:
        advantages = after["advantages"].view(3, SIZE)[:, 0]
        assert advantages.tolist() == pytest.approx([0.75 / (0.5 + 1e-4)] * 3), "one success of four"
