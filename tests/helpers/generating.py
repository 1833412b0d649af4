"""Generating again by hand: which group of which round a slot must hold, and what follows of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import replaying
import torch
from image_rows import assert_same_images
from releases import COUNTS_TRUNCATED
from replaying import Watch, assert_identical, check_losses, original

import trl_replay
from trl_replay.data.types import Batch
from trl_replay.session import Session

SIZE = 4
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(3)]
LIVE = ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0])
DEAD = ([0.0] * SIZE, [1.0] * SIZE)


class Coins:
    """A reward function: groups are live with the chance `live`, and what it gave is kept, call by call."""

    def __init__(self, live: float, seed: int = 0, size: int = SIZE) -> None:
        self.live = live
        self.random = random.Random(seed)
        self.size = size
        self.calls: list[list[list[float]]] = []
        self.prompts: list[list[str]] = []
        self.__name__ = "coins"

    def __call__(self, completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
        groups = []
        for _ in range(len(completions) // self.size):
            kinds = LIVE if self.random.random() < self.live else DEAD
            groups.append(self.random.choice(kinds))
        self.calls.append(groups)
        self.prompts.append([str(prompt) for prompt in prompts[:: self.size]])
        return [reward for group in groups for reward in group]


def is_dead(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) == 1


def trained_rewards(groups: Sequence[Any], scored: Batch) -> list[Any]:
    """The rewards of a call, all 0 for a group in which no row with an advantage trains a token."""
    tokens = scored["completion_mask"].sum(dim=1)
    trains = ((tokens > 0) & (scored["advantages"].abs() > 1e-3)).view(-1, SIZE).any(dim=1)
    return [group if alive else DEAD[0] for group, alive in zip(groups, trains.tolist(), strict=True)]


def rounds_of(calls: Sequence[Any], limit: int, slots: int = 3) -> list[list[int]]:
    """The calls of each batch: a batch begins with as many groups as it has slots, a round has what is needed."""
    batches: list[list[int]] = []
    needed = 0
    for number, groups in enumerate(calls):
        if needed and len(batches[-1]) <= limit:
            assert len(groups) == needed
            batches[-1].append(number)
            needed -= min(needed, sum(not is_dead(group) for group in groups))
        else:
            assert len(groups) == slots
            batches.append([number])
            needed = sum(map(is_dead, groups))
    return batches


def by_hand(calls: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, int]]:
    """Of each slot, the round and the group that it must hold: live groups take dead slots in order."""
    held = [(0, slot) for slot in range(len(calls[0]))]
    for number, groups in enumerate(calls[1:], 1):
        live = [place for place, group in enumerate(groups) if not is_dead(group)]
        dead = [slot for slot, (of, place) in enumerate(held) if is_dead(calls[of][place])]
        for slot, place in zip(dead, live, strict=False):
            held[slot] = (number, place)
    return held


def watched(trainer: Any, rewards: Coins, limit: int, **settings: Any) -> tuple[Any, Session, Watch]:
    """Trains with further rounds, at most `limit` a batch, and checks every batch and every loss."""
    session = trl_replay.attach(trainer, replay_refill=f"new(rounds={limit})", **settings)
    watch = replaying.watched(trainer, session)
    trainer.train()
    check_rounds(trainer, rewards, watch, limit)
    check_losses(trainer, replays=False)
    return trainer, session, watch


def check_rounds(trainer: Any, rewards: Coins, watch: Watch, limit: int) -> None:
    """Each slot holds the very rows of the group that takes it, and the batch counts their tokens."""
    calls = [trained_rewards(groups, scored) for groups, scored in zip(rewards.calls, trainer.scored, strict=True)]
    batches = rounds_of(calls, limit)
    assert len(batches) == len(watch.steps)
    assert max(map(len, batches)) == limit + 1, "no batch needed all rounds: the test says little"
    for numbers, (merged, _) in zip(batches, watch.steps, strict=True):
        held = by_hand([calls[number] for number in numbers])
        scored = [trainer.scored[number] for number in numbers]
        assert list(merged) == list(scored[0])
        for slot, (number, place) in enumerate(held):
            for row in range(SIZE):
                found = original(merged, slot * SIZE + row, watch.pad)
                expected = original(scored[number], place * SIZE + row, watch.pad)
                assert_same_row(found, expected)
        assert int(merged["num_items_in_batch"]) == items(merged, watch)


def items(batch: Batch, watch: Watch) -> int:
    """Tokens that count, of rows as they are."""
    rows = [original(batch, row, watch.pad) for row in range(len(batch["advantages"]))]
    if COUNTS_TRUNCATED:
        return sum(int((torch.ones_like(row["ids"]) * row.get("tool_mask", 1)).sum()) for row in rows)
    return sum(int(row["mask"].sum()) for row in rows)


def assert_same_row(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert_identical(found[key], value, key)
        elif key == "ratio_width":  # of the batch: one number a row, or as many as its longest completion has
            assert (found[key] == 1) == (value == 1)
        elif key == "images":
            assert_same_images(found[key], value)
        else:
            assert found[key] == value, key
