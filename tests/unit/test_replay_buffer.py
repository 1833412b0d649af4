"""The buffer: capacity in groups and in bytes, which entries are eligible, and which leave; by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from buffers import nothing

from trl_replay import Group, ReplayError
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.data.fields import PIXELS

TEXT = frozenset({"prompt_ids", "completion_ids"})


def by_score(table: Any) -> Any:
    return table.score


def stored(capacity: int = 50, limits: Limits | None = None, count: int = 4, **columns: Any) -> ReplayBuffer:
    """A buffer that was offered entries with serials 0, 1, …, of score 1 each."""
    buffer = ReplayBuffer(capacity, limits or Limits())
    offer(buffer, count, **columns)
    if "uses" in columns:
        buffer.table.writable("uses")[:] = columns["uses"]
    return buffer


def offer(buffer: ReplayBuffer, count: int, **columns: Any) -> tuple[list[int], int]:
    first = columns.pop("first", 0)
    keys = [buffer.keyset(keys) for keys in columns.pop("keysets", [TEXT] * count)]
    made = {"serial": np.arange(first, first + count), "score": np.ones(count), "keys": np.array(keys, np.int64)}
    made |= {name: np.asarray(values) for name, values in columns.items()}
    serials, evicted = buffer.offer(made, by_score, np.random.default_rng(first))
    buffer.receive(nothing(serials))
    return serials, evicted


def serials(buffer: ReplayBuffer) -> list[int]:
    return sorted(buffer.table.serial.tolist())


def test_over_the_bytes_the_lowest_keep_ranks_leave_until_the_rest_fits() -> None:
    buffer = stored(count=3, nbytes=[1000, 800, 1000], score=[3.0, 1.0, 1.0])
    buffer.max_bytes = 3000 + 3 * buffer.table.row_bytes
    with pytest.warns(UserWarning, match=r"replay_max_bytes is reached with 3 .*A group costs .* on average"):
        offer(buffer, 1, first=3, nbytes=[1500], score=[2.0])
    assert serials(buffer) == [0, 3], "the older of two equal ranks left first, then the other"


def test_where_bytes_and_groups_are_both_too_many_the_stricter_limit_decides() -> None:
    """One entry less would fit into the bytes, but the buffer has room for two groups."""
    buffer = stored(count=5, nbytes=[100, 100, 100, 100, 1000], score=[5.0, 4.0, 3.0, 2.0, 1.0])
    buffer.capacity, buffer.max_bytes = 2, 500 + 5 * buffer.table.row_bytes
    assert buffer.trim(by_score) == 3, "without a warning: bytes are not what evicts most"
    assert serials(buffer) == [0, 1]


def test_bytes_that_just_fit_evict_nobody() -> None:
    buffer = stored(count=3, nbytes=[100, 100, 100])
    buffer.max_bytes = 300 + 3 * buffer.table.row_bytes
    assert buffer.trim(by_score) == 0
    buffer.max_bytes -= 1
    with pytest.warns(UserWarning, match=r"is reached with 2 of replay_buffer_size=50"):
        assert buffer.trim(by_score) == 1
    assert serials(buffer) == [1, 2]
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes])).tolist() == [True]
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes + 1])).tolist() == [False]
    buffer.max_bytes = None
    assert buffer.fits(np.array([10**15, 1])).tolist() == [True, True]


def eligible(buffer: ReplayBuffer, update: int, keys: frozenset[str] = TEXT) -> tuple[list[int], list[str]]:
    rows, reasons = buffer.eligible(update, keys)
    return buffer.table.serial[rows].tolist(), reasons


def test_the_limits_include_their_value_and_are_named() -> None:
    steps, uses = [0, 6, 7, 7], [0, 0, 2, 3]
    buffer = stored(limits=Limits(max_age=4, max_uses=3), update=steps, uses=uses)
    assert eligible(buffer, 10) == ([1, 2], ["replay_max_age", "replay_max_uses"])
    assert eligible(stored(update=[0] * 4), 10) == ([0, 1, 2, 3], [])


def test_an_entry_must_restore_every_key_and_brings_images_only_where_they_fit() -> None:
    reference, pictured = TEXT | {"ref_per_token_logps"}, TEXT | {PIXELS}
    buffer = stored(update=[0] * 4, keysets=[TEXT, reference, pictured, TEXT])
    assert eligible(buffer, 9) == ([0, 1, 3], ["has images, the batch none"])
    assert eligible(buffer, 9, TEXT | {PIXELS})[0] == [0, 1, 2, 3], "those without images fit in any batch"
    told = ["lacks a tensor", "has images, the batch none"]
    assert eligible(buffer, 9, reference) == ([1], told)


def test_columns_come_back_with_keys_that_are_numbered_anew() -> None:
    pictured = TEXT | {PIXELS}
    saved = stored(count=3, keysets=[TEXT, pictured, TEXT], score=[1.0, 2.0, 3.0], prompt=[4, 4, 5])
    saved.table.add_column("gone", fill=1.0)
    state = saved.state_dict()
    saved.table.writable("score")[:] = 0.0
    other = ReplayBuffer(50, Limits())
    other.table.add_column("mine", fill=0.5)
    other.keyset(pictured)
    offer(other, 2, first=90)
    other.load_state_dict(state)
    table = other.table
    assert table.serial.tolist() == [0, 1, 2]
    assert table.score.tolist() == [1.0, 2.0, 3.0], "the state is a copy"
    assert table.mine.tolist() == [0.5] * 3
    assert "gone" not in table.names
    assert table.peers.tolist() == [2, 2, 1]
    keysets = other.state_dict()["keysets"]
    assert [keysets[number] for number in table.keys.tolist()] == [TEXT, pictured, TEXT]
    assert other.held() == []


def test_a_buffer_keeps_copies_and_hands_out_copies() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    group = Group({"completion_ids": tensor}, frozenset(["completion_ids"]), np.array([2]), np.array([1, 3]))
    buffer = ReplayBuffer(1, Limits())
    buffer.offer({"serial": np.array([5])}, by_score, np.random.default_rng(0))
    empty = buffer.nbytes
    buffer.receive({5: group})
    assert buffer.nbytes - empty == group.nbytes == 4 * 4 + 3 * 8
    tensor[:] = 9
    buffer.load(5).tensors["completion_ids"][:] = 8
    buffer.load(5).completion_lengths[:] = 8
    again = buffer.load(5)
    assert again.tensors["completion_ids"].tolist() == [0, 1, 2, 3]
    assert again.completion_lengths.tolist() == [1, 3]
    buffer.clear()
    assert buffer.nbytes == 0


def test_a_buffer_of_no_session_takes_nothing() -> None:
    with pytest.raises(ReplayError, match=r"of an attached session only"):
        ReplayBuffer(1, Limits()).add([])
