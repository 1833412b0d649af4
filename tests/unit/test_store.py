"""What is kept: capacity in groups and in bytes, and which entries leave; by hand."""

import tracemalloc

import numpy as np
import pytest
import torch
from buffers import nothing

from trl_replay import Group
from trl_replay.buffer.replay_buffer import Store
from trl_replay.data.types import PIXELS
from trl_replay.serialization.groups import pack

TEXT = frozenset({"prompt_ids", "completion_ids"})


def by_score(table):
    return table.score


def stored(capacity=50, count=4, **columns):
    """A buffer that was offered entries with serials 0, 1, …, of score 1 each."""
    buffer = Store(capacity)
    offer(buffer, count, **columns)
    return buffer


def offer(buffer, count, **columns):
    first = columns.pop("first", 0)
    keys = [buffer.keyset(keys) for keys in columns.pop("keysets", [TEXT] * count)]
    made = {"serial": np.arange(first, first + count), "score": np.ones(count), "keys": np.array(keys, np.int64)}
    made |= {name: np.asarray(values) for name, values in columns.items()}
    buffer.append(made, np.random.default_rng(first))
    buffer.evict(by_score)
    buffer.receive(nothing(serial for serial in made["serial"].tolist() if serial in buffer.table.serial))


def serials(buffer):
    return sorted(buffer.table.serial.tolist())


def test_kinds_of_groups_that_have_left_take_no_memory():
    """Each image has a size of its own, and with it each group a kind."""
    buffer, held = Store(4), {}
    tracemalloc.start()
    for serial in range(2000):
        image = pack(Group({"key": torch.zeros(1, 1 + serial)}, TEXT, np.array([1]), np.array([1])))
        buffer.append({"serial": np.array([serial]), "nbytes": np.array([8])}, np.random.default_rng(0))
        buffer.receive({serial: image._replace(data=image.data[:8])})
        buffer.evict(lambda table: table.serial)
        if serial in (500, 1999):
            held[serial] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held[1999] < held[500] + 200_000, "1,500 kinds more would take 1 MB"


def test_payload_that_comes_again_takes_the_place_of_what_was_there():
    payload = pack(Group({"key": torch.zeros(9)}, TEXT, np.array([1]), np.array([9])))
    buffer = stored(count=9, nbytes=[len(payload.data)] * 9)
    buffer.receive(dict.fromkeys(range(9), payload))
    costs = len(payload.data) + buffer.table.row_bytes
    assert buffer.nbytes == 9 * costs
    buffer.forget(np.arange(9))
    assert buffer.nbytes == 0


def test_bytes_that_just_fit_evict_nobody():
    buffer = stored(count=3, nbytes=[100, 100, 100])
    buffer.max_bytes = 300 + 3 * buffer.table.row_bytes
    assert buffer.evict(by_score) == 0
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes])).tolist() == [True]
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes + 1])).tolist() == [False]


def test_columns_come_back_with_keys_that_are_numbered_anew():
    pictured = TEXT | {PIXELS}
    saved = stored(count=3, keysets=[TEXT, pictured, TEXT], score=[1.0, 2.0, 3.0], prompt=[4, 4, 5])
    saved.table.add_column("gone", fill=1.0)
    state = saved.state_dict()
    saved.table.writable("score")[:] = 0.0
    other = Store(50)
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


def test_a_buffer_keeps_copies_and_hands_out_copies():
    tensor = torch.arange(4, dtype=torch.int32)
    group = Group({"completion_ids": tensor}, frozenset(["completion_ids"]), np.array([2]), np.array([1, 3]))
    buffer = Store(1)
    buffer.append({"serial": np.array([5])}, np.random.default_rng(0))
    buffer.receive({5: pack(group)})
    tensor[:] = 9
    buffer.load(5).tensors["completion_ids"][:] = 8
    again = buffer.load(5)
    assert again.tensors["completion_ids"].tolist() == [0, 1, 2, 3]
    buffer.forget([0])
    with pytest.raises(KeyError):
        buffer.load(5)
