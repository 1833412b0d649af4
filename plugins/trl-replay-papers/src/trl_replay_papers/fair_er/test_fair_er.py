"""FAIR's experience replay: what the later iterations train on, and what leaves the buffer, by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from methods import SIZE
from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_context, make_table, make_trainer
from trl_replay_papers.fair_er import make_keep_right

SCRIPT = ([LIVE, HALF, LIVE], [HALF, DEAD, LIVE], [LIVE, LIVE, HALF], [DEAD, DEAD, LIVE])


def completions(batch: Any) -> list[tuple[int, ...]]:
    """Each row's, without padding."""
    pairs = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in pairs]


def test_later_iterations_train_on_the_last_live_groups(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=8, num_iterations=2, trainer_class=Spy)
    session = trl_replay.attach(trainer, replay_preset="fair_er", replay_buffer_size=4)
    batches = record(session)
    trainer.train()
    live: list[list[tuple[int, ...]]] = []
    for generation, rewards in enumerate(SCRIPT):
        rows = completions(batches[generation][0])
        groups = [rows[at : at + SIZE] for at in range(0, len(rows), SIZE)]
        live += [group for group, reward in zip(groups, rewards, strict=True) if reward != DEAD]
        drawn = completions(trainer.losses[2 * generation + 1]["inputs"])
        stored = [group for group in live[-4:] if set(group) <= set(drawn)]
        assert sorted(drawn) == sorted(itertools.chain(*stored)), "whole groups of the last four live ones, each once"
        assert len(stored) == min(len(live), 3), "as many as the batch has"
    assert session.totals.counters["iterated"] == 12


MOSTLY = [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.0, [8, 9, 10, 11]),
        (0.5, [0, 7, 10, 11]),  # the newest two, and the newest right ones besides
        (0.25, [7, 9, 10, 11]),
        (0.75, [0, 7, 10, 11]),  # there are no more than two right ones: 10 has the last place
        (1.0, [0, 7, 10, 11]),
    ],
)
def test_a_share_of_the_buffer_is_kept_for_the_newest_right_groups(
    tmp_path: Any, share: float, kept: list[int]
) -> None:
    script = ([MOSTLY, LIVE, LIVE], [LIVE, LIVE, LIVE], [LIVE, MOSTLY, LIVE], [LIVE, LIVE, LIVE])
    trainer = make_trainer(tmp_path, Rewards(*script), max_steps=8, num_iterations=2)
    evictor = {"replay_evictor": f"fair_er/keep_right(share={share!r})"}
    session = trl_replay.attach(trainer, replay_preset="fair_er", replay_buffer_size=4, **evictor)
    trainer.train()
    assert sorted(session.buffer.table.serial.tolist()) == kept


def test_a_group_is_right_by_the_share_of_its_scored_rows() -> None:
    rewards = [[1, 1, 0, 0], [1, 0, 0, 0], [0.4, 0.4, 0, 0], [1, 0, np.nan, np.nan], [np.nan] * 4, [0] * 4]
    table = make_table([1.0] * 6, row_rewards=np.array(rewards)[:, :, None])
    for settings, right in (
        ({}, [0, 3]), ({"least": 0.25}, [0, 1, 3]), ({"threshold": 0.4}, [0, 2, 3]), ({"least": 0.6}, []),
        ({"least": 0.0}, [0, 1, 3]),
    ):  # fmt: skip
        ranks = make_keep_right(share=1.0, **settings)(table, make_context(table))
        assert np.argsort(ranks).tolist() == [row for row in range(6) if row not in right] + right


@pytest.mark.parametrize("arguments", [{"share": 1.5}, {"share": "all"}, {"least": -0.1}, {"threshold": np.nan}])
def test_arguments_of_the_evictor_that_can_not_be_used_are_named(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(trl_replay.ConfigurationError, match=f"keep_right: {name}=.* can't be used"):
        make_keep_right(**arguments)


def test_it_asks_for_several_iterations(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(RefusedError, match="num_iterations"):
        trl_replay.attach(trainer, replay_preset="fair_er")
