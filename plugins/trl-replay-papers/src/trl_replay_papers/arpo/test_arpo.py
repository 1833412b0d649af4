"""ARPO: where a success is put, and what it trains on, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from methods import DEAD, SIZE, fresh, mixed_slots, same_prompt, stored, train


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
