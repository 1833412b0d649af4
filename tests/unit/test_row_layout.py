"""Where the rows of a batch lie: on one process, on several, and groups that straddle them; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from sampling import whole

from trl_replay import BatchError, SeamError
from trl_replay.batch.group_view import blank
from trl_replay.distributed.row_layout import MISSING, RowLayout, reason_to_stop, unpacked
from trl_replay.fields import PIXELS
from trl_replay.plan import Admitted, Sampled, Taken
from trl_replay.protocols import Agreement, Arrival, Request
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


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.data())
def test_which_rows_were_filled_travels_in_a_few_numbers(count: int, ranks: int, data: Any) -> None:
    filled = data.draw(st.lists(st.integers(0, ranks * count - 1), unique=True))
    words = []
    for rank in range(ranks):
        told = layout(count, 1, rank, ranks).filled(whole(filled, size=1))
        assert len(told) == -(-count // 48)
        words.append(told)
    assert unpacked(np.array(words), count) == [row in filled for row in range(ranks * count)]


def test_decisions_have_the_same_identity_where_they_are_the_same() -> None:
    table = make_table([1.0, 2.0], serial=[3, 4])
    admitted, sampled = Admitted([Arrival(4, np.array([1]))]), whole([0], [3], [1], [0], [1.0])
    told = STRADDLING[0].identity(table, admitted, sampled)
    assert told.tolist() == STRADDLING[1].identity(table, admitted, sampled).tolist()
    assert told[0] == 0
    assert layout(8, 4, rank=2, ranks=3, alone=True).identity(table, admitted, sampled)[0] == 2
    assert told[1] == int(told[1]) < 2**48
    others = [
        (make_table([1.0, 2.0], serial=[3, 5]), admitted, sampled),
        (table, Admitted(), sampled),
        (table, admitted, Sampled()),
        (table, admitted, whole([1], [3], [1], [0], [1.0])),
        (table, admitted, whole([0], [4], [1], [0], [1.0])),
        (table, admitted, Sampled([replace(sampled.taken[0], targets=np.arange(3), sources=np.arange(3))])),
        (table, admitted, Sampled([replace(sampled.taken[0], sources=np.array([0, 1, 3, 2]))])),
    ]
    assert len({STRADDLING[0].identity(*decided)[1] for decided in others} | {told[1]}) == 8


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
    assert unpacked(whole_slot.filled(sampled)[None], 8) == [False] * 4 + [True, False, True, True]
    only_here = Sampled([replace(taken, targets=np.array([0, 1]), sources=np.array([0, 1]))])
    assert STRADDLING[0].requests(only_here, np.array([0, 0, 0, 1])) == [Request(7, 1, (0,))], "no other needs it"


def agreement(
    identities: list[tuple[float, float]], errors: list[str], modes: tuple[int, ...] = (0,) * 9
) -> Agreement:
    """Three counters first, and one number after."""
    ranks = zip(modes, identities, strict=False)
    rows = [[1.0, 2.0, 3.0 + rank, mode, *one, 9.0 * rank] for rank, (mode, one) in enumerate(ranks)]
    return Agreement(np.array(rows), errors)


def test_all_stop_for_an_error_of_any_or_for_decisions_that_differ() -> None:
    assert reason_to_stop(agreement([(0, 5), (0, 5)], ["", ""]), 3) == ""
    assert reason_to_stop(agreement([(0, 5), (1, 6)], ["", ""]), 3) == "", "buffers of their own"
    assert reason_to_stop(agreement([(0, 5), (0, 6)], ["", "OSError: x"]), 3) == "rank 1: OSError: x"
    assert reason_to_stop(agreement([(0, 5), (0, 5)], ["a", "b"]), 3) == "rank 0: a; rank 1: b"
    for identities in ([(0, 5), (0, 6)], [(0, 5), (0, 5), (2, 5), (2, 7)]):
        assert "decided differently" in reason_to_stop(agreement(identities, [""] * len(identities)), 3)


def test_all_stop_where_some_have_paused_or_detached() -> None:
    same = [(0.0, 5.0)] * 3
    assert reason_to_stop(agreement(same, [""] * 3, (1, 1, 1)), 3) == ""
    words = "It runs on rank 0, 2 and is paused on rank 1: pause, resume and detach on all processes"
    assert reason_to_stop(agreement(same, [""] * 3, (0, 1, 0)), 3).startswith(words)
    assert "runs on rank 1 and is detached on rank 0" in reason_to_stop(agreement(same[:2], ["", ""], (2, 0)), 3)
    assert reason_to_stop(agreement(same[:2], ["", "OSError: x"], (0, 1)), 3) == "rank 1: OSError: x"
