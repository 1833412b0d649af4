"""The message of one all-gather: numbers with names, and what all processes stop for; by hand."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from trl_replay.distributed.agreement import decision_message, packed_bits, unpacked_bits


@settings(deadline=None, database=None)
@given(st.integers(1, 60), st.integers(1, 3), st.data())
def test_which_rows_were_filled_travels_in_a_few_numbers(count, ranks, data):
    rows = st.lists(st.booleans(), min_size=count, max_size=count)
    masks = [data.draw(rows) for _ in range(ranks)]
    words = np.stack([packed_bits(np.array(mask)) for mask in masks])
    assert words.shape == (ranks, -(-count // 48))
    assert decision_message(count).unpack(decision_message(count).pack()[None])["filled"].shape == (1, words.shape[1])
    assert unpacked_bits(words, count) == [row for mask in masks for row in mask]
