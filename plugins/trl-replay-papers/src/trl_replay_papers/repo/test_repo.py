"""RePO: its rows, their advantages and the loss, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import SIZE, mixed_slots, same_prompt, stored, train
from replaying import Watch
from support import Rewards, Spy

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.errors import RefusedError
from trl_replay.testing import make_context, make_groups, make_table, make_trainer
from trl_replay_papers.repo import make_cached


def test_repo_puts_cached_rows_of_most_variance_into_groups_and_normalizes_each_kind_apart(tmp_path: Any) -> None:
    session, watch = train(tmp_path, "split", {"replay_preset": "repo"})
    found = list(mixed_slots(watch))
    assert len(found) > 4
    for step, slot, rows in found:
        assert sorted(rows) == [2, 3], "the last two rows"
        serials = {serial for serial, _ in rows.values()}
        assert all(same_prompt(watch, step, slot, serial) for serial in serials)
        newest = sorted(
            (s for s, (when, where) in watch.origin.items() if where == slot and when < step), reverse=True
        )
        cached = [stored(watch, serial, row) for serial in newest[:2] for row in range(SIZE)]
        assert [stored(watch, *rows[place]) for place in (2, 3)] == [max(cached), min(cached)]
    assert session.totals.counters["lost"] == 0


def rows_of(rewards: list[list[float]], by: str, **arguments: Any) -> list[int]:
    """The rows of one slot after the mixer, with these stored groups, the newest first."""
    table = make_table([1.0] * len(rewards), row_rewards=[[[reward] for reward in group] for group in rewards])
    slots = make_groups([[0.0] * SIZE])
    drawn = np.arange(len(rewards))[None]
    return make_cached(by=by, **arguments)(table, drawn, slots, make_context(table, num_generations=SIZE))[0].tolist()


def test_the_rows_of_most_variance_are_the_best_and_the_worst_by_turns() -> None:
    stored = [[0.0, 1.0, 0.2, 0.8], [0.4, 0.9, 0.1, 0.5]]
    assert rows_of(stored, "variance", rows=4) == [1, 0, 5, 6]
    assert rows_of(stored, "reward", rows=4) == [1, 5, 3, 7]
    assert rows_of(stored, "recent", rows=3) == [-1, 0, 1, 2]
    assert len(set(rows_of(stored, "random", rows=4))) == 4


def test_no_row_is_used_before_as_many_are_cached_as_may_be_drawn() -> None:
    table = make_table([1.0], row_rewards=[[[0.0], [1.0], [0.0], [1.0]]])
    slots = make_groups([[0.0] * SIZE])
    context = make_context(table, num_generations=SIZE)
    drawn = np.array([[0, -1]])
    assert make_cached()(table, drawn, slots, context).tolist() == [[-1] * SIZE]
    assert make_cached(cached=4)(table, drawn, slots, context).tolist() == [[-1, -1, 1, 2]]


def test_rows_that_no_function_scored_are_no_worst_ones(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([[1.0, None, 0.0, 0.0]] * 3), max_steps=5, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="repo")
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.train()
    found = list(mixed_slots(watch))
    assert found, session.explain()
    for _, _, rows in found:
        assert [stored(watch, *rows[place]) for place in (2, 3)] == [1.0, 0.0]


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_which_one_row_would_be_cached_are_refused(tmp_path: Any, size: int) -> None:
    trainer = make_trainer(tmp_path, Rewards([[0.0] * size]), num_generations=size, per_device_train_batch_size=size)
    for mixer in ("repo/cached", "repo/cached(by='reward')"):
        with pytest.raises(RefusedError, match=f"num_generations={size} a single row"):
            trl_replay.attach(trainer, replay_preset="repo", replay_mixer=mixer)
    trl_replay.attach(trainer, replay_preset="repo", replay_mixer="repo/cached(rows=2)")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"rows": 1}, "rows=1 can't be used"), ({"cached": 0}, "cached=0"), ({"by": "worst"}, "by='worst'")],
)
def test_arguments_that_can_not_be_used_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make_cached(**arguments)
