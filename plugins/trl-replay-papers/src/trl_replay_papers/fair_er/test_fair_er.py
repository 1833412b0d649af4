"""FAIR's experience replay: what the later iterations train on, and what leaves the buffer, by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from methods import SIZE
from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.testing import make_trainer

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


def test_it_asks_for_several_iterations(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(trl_replay.RefusedError, match="num_iterations"):
        trl_replay.attach(trainer, replay_preset="fair_er")
