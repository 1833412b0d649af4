"""Where the rows of a batch lie: on one process, on several, and groups that straddle them; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling import whole

from trl_replay import BatchError, SeamError
from trl_replay.batch.group_view import blank
from trl_replay.decision import Admitted, Decision, Sampled, Taken
from trl_replay.distributed.row_layout import MISSING, RowLayout
from trl_replay.fields import PIXELS
from trl_replay.protocols import Arrival, Request
from trl_replay.testing import make_table
from trl_replay.types import Group

KEYS = frozenset({"prompt_ids"})


def layout(count: int, size: int, rank: int = 0, ranks: int = 1, alone: bool = False, **columns: Any) -> RowLayout:
    """`count` rows on each of `ranks` processes, as `rank` sees them; `alone`: each shares its own rows only."""
    shared = blank(rank * count, count) if alone else blank(0, ranks * count)
    shared |= {name: np.asarray(values) for name, values in columns.items()}
    return RowLayout(shared, blank(rank * count, count), size)


# six rows on each of two processes, groups of four: the middle one straddles
STRADDLING = [layout(6, 4, rank, 2) for rank in (0, 1)]


def test_a_straddling_groups_rows_are_divided_where_the_processes_meet() -> None:
    first, second = STRADDLING
    assert [first.local(slot) for slot in range(3)] == [(slice(0, 4), 0), (slice(4, 6), 0), (slice(0, 0), 0)]
    assert [second.local(slot) for slot in range(3)] == [(slice(0, 0), 0), (slice(0, 2), 2), (slice(2, 6), 0)]
    for rows in STRADDLING:
        assert [rows.span(slot) for slot in range(3)] == [range(4), range(4, 8), range(8, 12)]
        assert [rows.home(slot) for slot in range(3)] == [0, None, 1]


def test_with_a_buffer_of_its_own_a_process_counts_its_own_slots() -> None:
    rows = layout(8, 4, rank=2, ranks=3, alone=True)
    assert [rows.span(slot) for slot in range(2)] == [range(16, 20), range(20, 24)]
    assert [rows.local(slot) for slot in range(2)] == [(slice(0, 4), 0), (slice(4, 8), 0)]
    assert [rows.home(slot) for slot in range(2)] == [2, 2]
    assert rows.leads


def test_the_first_of_the_processes_that_share_a_buffer_leads() -> None:
    assert [rows.leads for rows in STRADDLING] == [True, False]


def test_whole_groups_pass_and_others_are_refused_with_the_numbers() -> None:
    STRADDLING[1].check(scored=12, processes=2)
    layout(8, 4, rank=1, ranks=2, alone=True).check(scored=16, processes=2)
    with pytest.raises(SeamError, match="6 rows a process, and rewards of 11 rows on 2 process"):
        STRADDLING[0].check(scored=11, processes=2)
    with pytest.raises(SeamError, match="rows 6 to 11, which are not whole groups of 4"):
        layout(6, 4, rank=1, ranks=2, alone=True).check(scored=12, processes=2)
    with pytest.raises(SeamError, match="rows 4 to 7, which are not whole groups of 8"):
        layout(4, 8, rank=1, ranks=2, alone=True).check(scored=8, processes=2)
    shifted = layout(4, 4, row=[2, 3, 4, 5])
    with pytest.raises(SeamError, match="rows 2 to 5"):
        shifted.check(scored=4, processes=1)


def test_a_groups_size_is_its_packed_parts_and_two_lengths_a_row() -> None:
    nbytes = np.zeros(12, np.int64)
    nbytes[[0, 4, 6, 8]] = [100, 40, 30, 7]  # the middle group has a part on each process
    rows = layout(6, 4, 0, 2, nbytes=nbytes)
    assert rows.sizes([0, 1, 2]) == [100 + 64, 70 + 64, 7 + 64]
    assert rows.sizes([2, 0]) == [7 + 64, 100 + 64]
    assert rows.sizes([]) == []
    arrivals = rows.arrivals([5, 9], [1, 2], ranks=2)
    assert [(one.serial, one.sizes.tolist()) for one in arrivals] == [(5, [40, 30]), (9, [0, 7])]


def test_groups_that_found_no_room_are_told_once() -> None:
    assert layout(4, 4, overflow=[4, 0, 1, 4]).overflowed() == [0, 3]
    assert layout(4, 4).overflowed() == []


def test_images_fit_where_every_process_has_some_and_belong_to_the_groups_that_have_one() -> None:
    mixed = layout(8, 4, images=[0, 0, 0, 0, 0, 2, 0, 0])
    assert mixed.takes(KEYS) == KEYS | {PIXELS}
    assert [mixed.holds(KEYS, slot) for slot in (0, 1)] == [KEYS, KEYS | {PIXELS}]
    text = layout(8, 4, images=[0, 0, 0, 0, -1, -1, -1, -1])
    assert text.takes(KEYS) == KEYS


def test_drawn_payload_is_asked_of_its_owner_for_the_processes_that_have_the_slot() -> None:
    sampled = whole([1, 2], [7, 5], [1, 1], [3, 0], [1.0, 1.0])
    requests = STRADDLING[0].requests(sampled, np.array([1, 0, 0, 0]))
    assert requests == [Request(7, 0, (0, 1)), Request(5, 1, (1,))]


def group() -> Group:
    return Group({}, KEYS, np.array([1]), np.ones(4, np.int64))


def test_what_was_drawn_is_placed_on_the_rows_that_are_here() -> None:
    sampled = whole([1, 2], [7, 5], [3, 4], [0, 1], [1.0, 2.5])
    groups = {7: group(), 5: group()}
    (straddling,) = STRADDLING[0].placements(sampled, groups)
    assert (straddling.serial, straddling.age, straddling.rows, straddling.part) == (7, 3, slice(4, 6), slice(0, 2))
    straddling, other = STRADDLING[1].placements(sampled, groups)
    assert (straddling.rows, straddling.part, straddling.priority) == (slice(0, 2), slice(2, 4), 1.0)
    assert (other.slot, other.rows, other.part, other.priority) == (2, slice(2, 6), slice(0, 4), 2.5)
    with pytest.raises(BatchError, match="stored group 5 can't be replayed: its owner could not load it"):
        STRADDLING[1].placements(sampled, {**groups, 5: MISSING})


def test_decisions_have_the_same_fingerprint_where_they_are_the_same() -> None:
    table = make_table([1.0, 2.0], serial=[3, 4])
    sampled = whole([0], [3], [1], [0], [1.0])
    decision = Decision(admitted=Admitted([Arrival(4, np.array([1]))]), sampled=sampled)
    told = STRADDLING[0].fingerprint(table, decision)
    assert told == STRADDLING[1].fingerprint(table, decision) < 2**48
    alone = layout(8, 4, rank=2, ranks=3, alone=True)
    assert (STRADDLING[1].leader, alone.leader) == (0, 2)
    assert alone.fingerprint(table, decision) == 0
    fewer = replace(sampled.taken[0], targets=np.arange(3), sources=np.arange(3))
    turned = replace(sampled.taken[0], sources=np.array([0, 1, 3, 2]))
    others = [
        replace(decision, admitted=Admitted()),
        *[
            replace(decision, sampled=other)
            for other in (
                Sampled(),
                whole([1], [3], [1], [0], [1.0]),
                whole([0], [4], [1], [0], [1.0]),
                Sampled([fewer]),
                Sampled([turned]),
            )
        ],
    ]
    found = {STRADDLING[0].fingerprint(table, other) for other in others}
    found.add(STRADDLING[0].fingerprint(make_table([1.0, 2.0], serial=[3, 5]), decision))
    assert len(found | {told}) == 8


def test_single_rows_are_asked_for_and_placed_where_they_are_taken() -> None:
    taken = Taken(1, 7, 3, age=2, priority=1.0, targets=np.array([0, 2, 3]), sources=np.array([3, 0, 1]))
    sampled, groups = Sampled([taken]), {7: group()}  # rows 4, 6 and 7: the first process has rows 0 to 5
    (request,) = STRADDLING[0].requests(sampled, np.array([0, 0, 0, 1]))
    assert request == Request(7, 1, (0, 1))
    (first,) = STRADDLING[0].placements(sampled, groups)
    assert (first.rows, first.part) == (slice(4, 5), slice(0, 1))
    (second,) = STRADDLING[1].placements(sampled, groups)
    assert (second.rows, second.part) == (slice(0, 2), slice(1, 3))
    whole_slot = layout(8, 4)
    assert [one.rows for one in whole_slot.placements(sampled, groups)] == [slice(4, 5), slice(6, 8)]
    assert whole_slot.filled(sampled).tolist() == [False] * 4 + [True, False, True, True]
    only_here = Sampled([replace(taken, targets=np.array([0, 1]), sources=np.array([0, 1]))])
    assert STRADDLING[0].requests(only_here, np.array([0, 0, 0, 1])) == [Request(7, 1, (0,))], "no other needs it"
