"""Failure 62 of docs/known-failures.md: rows that train no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import EVERY_GROUP, SAME_PROMPT
from support import DEAD, HALF, Rewards, record, replayed, tokens_of_replayed, truncating

import trl_replay
from trl_replay.testing import make_trainer

SIZE = 4
ALL_DEAD = [DEAD, DEAD, DEAD]
ALL_HALF = [HALF, HALF, HALF]
INJECT = {"replay_mixer": "inject", "replay_advantages": "joint", **EVERY_GROUP, **SAME_PROMPT}


def trained(
    tmp_path: Any, *script: Any, rollout: Any = None, training: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, list[Any]]:
    """Trains with truncated completions masked; the session and its recorded steps."""
    trainer = make_trainer(
        tmp_path, Rewards(*script), mask_truncated_completions=True, **{"max_steps": 3, **(training or {})}
    )
    trainer.rollout_func = rollout or truncating()
    session = trl_replay.attach(trainer, **{"replay_start": 0, **settings})
    steps = record(session)
    trainer.train()
    return session, steps


def test_62_a_row_without_a_trained_token_has_no_log_prob_and_is_injected_nowhere(tmp_path: Any) -> None:
    session, steps = trained(tmp_path, ALL_HALF, ALL_DEAD, **INJECT)
    tokens = tokens_of_replayed(steps)
    assert len(tokens) == 6, "one row for each dead group"
    assert min(tokens) > 0
    assert np.isnan(session.buffer.table.row_logp).tolist() == [[True, False, True, False]] * 3
    assert session.buffer.table.row_trains.tolist() == [[False, True, False, True]] * 3


def first_row(table: Any, drawn: Any, slots: Any, context: Any) -> Any:
    """A mixer that does not look at what the rows train."""
    return np.tile([0, -1, -1, -1], (len(drawn), 1))


class FirstRow:
    @trl_replay.hookimpl
    def trl_replay_mix(self, table: Any, drawn: Any, slots: Any, context: Any) -> Any:
        return first_row(table, drawn, slots, context)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replay_mixer": first_row}, "The mixer 'first_row'"),
        ({"replay_plugins": ["first_row"]}, "Plugin 'first_row' (registered in this process), in trl_replay_mix,"),
    ],
)
def test_62_a_mixer_that_chooses_such_a_row_is_named_and_the_fresh_row_stays(
    tmp_path: Any, settings: dict[str, Any], name: str
) -> None:
    trl_replay.register(FirstRow(), "first_row")
    try:
        session, steps = trained(tmp_path, ALL_HALF, ALL_DEAD, **{**INJECT, **settings})
    finally:
        trl_replay.unregister("first_row")
    assert tokens_of_replayed(steps) == []
    assert session.totals.reasons[f"{name} chose a stored row that trains nothing: the fresh row stays"] == 6


def test_62_a_group_that_is_replayed_whole_keeps_its_truncated_rows(tmp_path: Any) -> None:
    _, steps = trained(tmp_path, ALL_HALF, ALL_DEAD)
    assert replayed(steps) == [0, 3, 3]
    for _, after in steps[1:]:
        tokens = after["completion_mask"].sum(dim=1).view(3, SIZE)
        assert (tokens > 0).tolist() == [[False, True, False, True]] * 3
