"""What travels in one all-gather: numbers with names, and what all processes stop for; by hand."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from trl_replay.distributed.agreement import (
    Message,
    decision_message,
    packed_bits,
    reason_of_decisions,
    reason_of_failure,
    reason_of_modes,
    unpacked_bits,
)
from trl_replay.protocols import Agreement


def test_a_messages_fields_come_out_as_they_went_in() -> None:
    message = Message(count=(), keys=(3, 2))
    assert message.width == 7
    keys = np.arange(6.0).reshape(3, 2)
    told = message.unpack(np.stack([message.pack(count=5, keys=keys), message.pack()]))
    assert told["count"].tolist() == [5, 0]
    assert told["keys"].tolist() == [keys.tolist(), np.zeros((3, 2)).tolist()]


@settings(deadline=None, database=None)
@given(st.integers(1, 60), st.integers(1, 3), st.data())
def test_which_rows_were_filled_travels_in_a_few_numbers(count: int, ranks: int, data: st.DataObject) -> None:
    rows = st.lists(st.booleans(), min_size=count, max_size=count)
    masks = [data.draw(rows) for _ in range(ranks)]
    words = np.stack([packed_bits(np.array(mask)) for mask in masks])
    assert words.shape == (ranks, -(-count // 48))
    assert decision_message(count).unpack(decision_message(count).pack()[None])["filled"].shape == (1, words.shape[1])
    assert unpacked_bits(words, count) == [row for mask in masks for row in mask]


def test_all_stop_for_an_error_of_any() -> None:
    assert reason_of_failure(Agreement(np.zeros((2, 1)), ["", ""])) == ""
    assert reason_of_failure(Agreement(np.zeros((2, 1)), ["", "OSError: x"])) == "rank 1: OSError: x"
    assert reason_of_failure(Agreement(np.zeros((2, 1)), ["a", "b"])) == "rank 0: a; rank 1: b"


def test_all_stop_for_decisions_that_differ_in_one_buffer() -> None:
    assert reason_of_decisions(np.array([0.0, 0]), np.array([5.0, 5])) == ""
    assert reason_of_decisions(np.array([0.0, 1]), np.array([5.0, 6])) == "", "buffers of their own"
    assert "decided differently" in reason_of_decisions(np.array([0.0, 0]), np.array([5.0, 6]))
    assert "decided differently" in reason_of_decisions(np.array([0.0, 0, 2, 2]), np.array([5.0, 5, 5, 7]))


def test_all_stop_where_some_have_paused_or_detached() -> None:
    assert reason_of_modes(np.array([1.0, 1, 1])) == ""
    words = "It runs on rank 0, 2 and is paused on rank 1: pause, resume and detach on all processes"
    assert reason_of_modes(np.array([0.0, 1, 0])).startswith(words)
    assert "runs on rank 1 and is detached on rank 0" in reason_of_modes(np.array([2.0, 0]))
