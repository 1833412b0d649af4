"""Which dead groups are left, and which live groups of the same process are copied there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from batches import PAD, SIZE, make_batch
from sampling import whole

from trl_replay.batch.group_view import blank
from trl_replay.distributed.row_layout import RowLayout
from trl_replay.fields import FieldTable
from trl_replay.step.dead_groups import copies, dead_slots, place_copies
from trl_replay.testing import make_groups

LIVE, DEAD = [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]


def layout(count: int, rank: int = 0, ranks: int = 1) -> RowLayout:
    return RowLayout(blank(0, ranks * count), blank(rank * count, count), SIZE)


def pairs(rewards: Any, rows: RowLayout, filled: tuple[int, ...] = (), seed: int = 0) -> list[tuple[int, int]]:
    return copies(make_groups(rewards), whole(filled, size=SIZE), rows, np.random.default_rng(seed))


def test_the_dead_groups_that_nothing_filled_are_left() -> None:
    fresh = make_groups([DEAD, LIVE, DEAD, DEAD])
    assert dead_slots(fresh, [2]) == [0, 3]
    assert dead_slots(fresh, []) == [0, 2, 3]


def test_every_live_group_is_copied_once_before_any_twice() -> None:
    rewards = [DEAD, LIVE, DEAD, LIVE, DEAD, DEAD, DEAD]
    orders = set()
    for seed in range(20):
        found = pairs(rewards, layout(21), seed=seed)
        assert [dead for dead, _ in found] == [0, 2, 4, 5, 6]
        sources = [live for _, live in found]
        assert sorted(sources[:2]) == sorted(sources[2:4]) == [1, 3]
        orders.add(tuple(sources))
    assert len(orders) > 3, "in an order that is drawn"


def test_groups_that_replay_filled_are_neither_filled_nor_copied() -> None:
    assert pairs([DEAD, LIVE, DEAD, LIVE], layout(12), filled=(0, 3)) == [(2, 1)]


def test_without_a_live_or_a_dead_group_nothing_is_copied() -> None:
    assert pairs([DEAD, DEAD], layout(6)) == pairs([LIVE, LIVE], layout(6)) == []


def test_copies_stay_on_their_process_and_groups_on_several_are_left_alone() -> None:
    rewards = [DEAD, LIVE, DEAD, LIVE, DEAD, DEAD]
    for rank in (0, 1):
        assert pairs(rewards, layout(9, rank, 2)) == [(0, 1), (2, 1), (4, 3), (5, 3)]
    assert pairs([DEAD, LIVE, LIVE], layout(5, 0, 2)) == [], "one live group lies on both, one on the other process"


def test_copies_take_the_rows_that_they_are_for() -> None:
    batch = make_batch([[(2, 3), (2, 1), (2, 2)]] * 4, [], 0, [True] * 4)
    fields, rows = FieldTable(PAD), layout(6, 1, 2)
    (placed,) = place_copies(batch | {}, rows, [(0, 1), (3, 2)], fields)
    assert (placed.slot, placed.serial, placed.age) == (3, -1, 0)
    assert (placed.rows, placed.part) == (slice(3, 6), slice(0, 3))
    assert placed.group.completion_lengths.tolist() == [3, 1, 2]
    ids = torch.cat([batch["completion_ids"][row, :length] for row, length in enumerate([3, 1, 2])])
    assert torch.equal(placed.group.tensors["completion_ids"].long(), ids)
