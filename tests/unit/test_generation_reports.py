"""Messages between processes after a generation: on up to five ranks, whole groups and straddling ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_replay import SeamError
from trl_replay.distributed.communicator import SharedRows
from trl_replay.generation.prompts import ANY, GroupPlaces
from trl_replay.generation.rounds import KEPT, JudgedBatch, Reports

KEYS = 2**62 + 12345


@dataclass
class Groups:
    dead: Any


def generated(layout, dead, shared):
    """A batch or a round, as this rank sees it: all groups, or its own."""
    every = np.arange(len(dead) * layout.size)
    here = every[layout.rank * layout.rows : (layout.rank + 1) * layout.rows]
    seen = every if shared else here
    rows = SharedRows({"row": seen, "items": (seen * 7) % 11}, {"row": here}, layout.size)
    groups = seen[:: layout.size] // layout.size
    fresh = Groups(np.asarray(dead)[groups])
    return JudgedBatch({}, rows, fresh, torch.empty(0), (fresh,))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_all_ranks_hear_the_same_and_live_groups_take_dead_slots(data):
    ranks = data.draw(st.integers(1, 5), label="ranks")
    size = data.draw(st.integers(2, 4), label="size")
    slots = data.draw(st.integers(1, 4), label="slots")
    shift = data.draw(st.integers(0, size - 1), label="rows beyond whole groups")
    rows = slots * size + shift
    if rows * ranks % size:
        rows = slots * size
    layouts = [GroupPlaces(rows, size, rank, ranks) for rank in range(ranks)]
    straddles = layouts[0].straddles
    shared = straddles or data.draw(st.booleans(), label="shared")
    groups = layouts[0].groups
    dead = data.draw(st.lists(st.booleans(), min_size=groups, max_size=groups), label="dead")

    firsts = [tell(layout, dead, None, 0, shared) for layout in layouts]
    told = [Reports(layout).read(np.stack(firsts), layout) for layout in layouts]
    assert {one.live for one in told} == {groups - sum(dead)}
    assert len({one.needed for one in told}) == 1, "the same number everywhere, so that nobody waits"
    assert (told[0].sources == KEPT).all()
    if not straddles:
        by_rank = np.reshape(dead, (ranks, -1)).sum(axis=1)
        assert told[0].needed == by_rank.max()
    if not any(dead):
        return

    count = groups if straddles else told[0].needed * ranks
    live = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), label="live")
    of_round = [not one for one in live]
    seconds = [tell(layout, dead, of_round, told[0].needed, shared) for layout in layouts]
    heard = [Reports(layout).read(np.stack(seconds), layout.of_round(told[0].needed)) for layout in layouts]
    sources = heard[0].sources
    assert all((one.sources == sources).all() for one in heard)
    taken = np.flatnonzero(sources != KEPT)
    assert all(dead[slot] and live[sources[slot]] for slot in taken)
    assert len(set(sources[taken].tolist())) == len(taken)
    for rank in range(ranks) if not straddles else []:
        mine = range(rank * slots, (rank + 1) * slots)
        of_rank = live[rank * told[0].needed : (rank + 1) * told[0].needed]
        assert sum(slot in taken for slot in mine) == min(sum(dead[slot] for slot in mine), sum(of_rank))
    if straddles:
        assert sources[taken].tolist() == taken.tolist()
    assert heard[0].live == groups - sum(dead) + len(taken)
    assert heard[0].keys.tolist() == [KEYS + group for group in range(count)]
    items = np.arange(max(groups, count) * size) * 7 % 11
    by_group = items.reshape(-1, size).sum(axis=1)
    assert heard[0].items == sum(int(by_group[sources[slot]] - by_group[slot]) for slot in taken)


def keys_of(layout):
    return [KEYS + layout.mine_first + place for place in range(layout.mine_here)]


def tell(layout, dead, of_round, needed, shared):
    """One rank's vector, after the batch or after a round."""
    current = generated(layout, dead, shared)
    if of_round is None:
        return Reports(layout).of_batch(current, keys_of(layout))
    lying = layout.of_round(needed)
    latest = generated(lying, of_round, shared)
    return Reports(layout).of_round(current, latest, keys_of(lying), [ANY] * lying.mine_here)


def test_two_ranks_with_different_prompts_for_one_group_are_told():
    layouts = [GroupPlaces(6, 4, rank, 2) for rank in range(2)]
    vectors = np.stack([tell(layout, [False] * 3, None, 0, True) for layout in layouts])
    assert Reports(layouts[0]).read(vectors, layouts[0]).keys.tolist() == [KEYS, KEYS + 1, KEYS + 2]
    vectors[1, -2:] += 1  # another key
    vectors[1, -4:-2] += 1
    with pytest.raises(SeamError, match=r"Group 1 .* rank 0 and rank 1, with different prompts"):
        Reports(layouts[0]).read(vectors, layouts[0])
