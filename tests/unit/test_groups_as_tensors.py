"""Groups as bytes, and groups put together from the parts that several processes have."""

import json
import tracemalloc
import zlib
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batches import EXTRA, KEYS, make_batch
from hypothesis import given, settings

from trl_replay.batch.compose import cut, join
from trl_replay.buffer.replay_buffer import Store
from trl_replay.data.types import FieldTable, Group, Packed
from trl_replay.serialization.groups import GROUPS, INDEX, from_bytes, from_tensors, pack, to_bytes, to_tensors, unpack

DTYPES = (
    torch.int8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool,
    torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
NAMES = [f"key{number}" for number in range(19)]
FIELDS = FieldTable(0, extra=EXTRA)


EDGES = [0, *(2**bits + off for bits in (8, 16, 24, 32, 62) for off in (-1, 0, 1)), 2**63 - 1]
"""Around the widths of a narrowed number."""


def bytes_of(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(one, other):
    assert one.keys == other.keys
    assert one.prompt_lengths.tolist() == other.prompt_lengths.tolist()
    assert one.completion_lengths.tolist() == other.completion_lengths.tolist()
    assert one.prompt_lengths.dtype == other.prompt_lengths.dtype == np.int64
    assert {name: bytes_of(tensor) for name, tensor in one.tensors.items()} == {
        name: bytes_of(tensor) for name, tensor in other.tensors.items()
    }


@st.composite
def groups(draw):
    """Any group: rows without tokens, lengths beyond 65,535, every dtype, tensors of up to four dimensions."""
    size = draw(st.integers(1, 5))
    length = st.integers(0, 6) | st.just(70_000)
    completions = np.array(draw(st.lists(length, min_size=size, max_size=size)), np.int64)
    shared = draw(st.booleans())
    prompts = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=1)) * (1 if shared else size), np.int64)
    keys = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    tensors = {}
    for number, key in enumerate(sorted(keys - {min(keys)} if draw(st.booleans()) else keys)):
        dtype = draw(st.sampled_from(DTYPES))
        flat = st.sampled_from([(int(completions.sum()),), (int(prompts.sum()),), (size,)])
        shape = draw(flat | st.lists(st.integers(0, 3), max_size=3).map(lambda trailing: (size, *trailing)))
        count = int(np.prod(shape)) * dtype.itemsize
        drawn = np.random.default_rng(number).integers(0, 2, count, np.uint8)
        values = torch.cat([torch.empty(0, dtype=torch.uint8), torch.from_numpy(drawn)]).view(dtype)
        if dtype in (torch.int64, torch.int32, torch.int16) and len(values):
            edge = draw(st.sampled_from(EDGES)) * draw(st.sampled_from([1, -1]))
            values[draw(st.integers(0, len(values) - 1))] = max(min(edge, torch.iinfo(dtype).max), -edge % -(2**15))
        tensors[key] = values.view(shape)
    return Group(tensors, frozenset(keys), prompts, completions)


@settings(max_examples=120, deadline=None)
@given(st.lists(groups(), max_size=3))
def test_groups_come_out_as_they_went_in_whatever_the_order_of_their_tensors(given):
    packed = [pack(group) for group in given]
    assert [pack(replace(group, tensors=dict(reversed(group.tensors.items())))) for group in given] == packed
    found = from_bytes(to_bytes(packed))
    assert found == packed
    for before, after in zip(given, found, strict=True):
        assert_same(before, unpack(after))


def read(tensors):
    return list(from_tensors(tensors[INDEX], tensors[GROUPS], len(tensors[GROUPS])))


@pytest.mark.parametrize("width", [0, -1])
def test_70_numbers_of_no_bytes_would_inflate_and_are_refused(width):
    kind, data = pack(
        Group({"key0": torch.zeros(9, dtype=torch.int32)}, frozenset(NAMES), np.array([2]), np.array([3]))
    )
    of_none = kind._replace(tensors=(("key0", "torch.int32", (), width),))
    with pytest.raises(ValueError, match="can't have numbers of"):
        read(to_tensors({0: Packed(of_none, data[:12] + bytes(8))}))


@pytest.mark.parametrize("shape", [["ab"], [[1]]])
def test_70_a_dimension_that_is_no_number_is_refused_before_it_is_repeated(shape):
    """Python repeats a text or a list as often as a number says, of which each is a first dimension."""
    counted = np.array([1 << 24], np.uint32).tobytes() + bytes(8)
    index = [[[NAMES, 0, 0, [["key0", "torch.int32", shape, 1]]]], [[0, 0, 12, zlib.crc32(counted)]]]
    texts = {INDEX: json.dumps(index).encode(), GROUPS: counted}
    tensors = {name: torch.tensor(list(text), dtype=torch.uint8) for name, text in texts.items()}
    tracemalloc.start()
    try:
        with pytest.raises(TypeError):
            read(tensors)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("shape", [(7,), (7, 1), (1,)])
def test_numbers_apart_in_memory_are_packed_in_any_dtype(shape):
    values = torch.arange(1000, dtype=torch.bfloat16).requires_grad_().as_strided(shape, [100] * len(shape))
    for apart in (values, values[:1].expand(shape)):
        group = Group({"key0": apart}, frozenset(NAMES), np.array([2]), np.array([3]))
        assert torch.equal(unpack(pack(group)).tensors["key0"], apart)


def small(tokens, serial):
    """A group of eight rows, of a vocabulary of 151,000."""
    rng, count = np.random.default_rng(serial), 8 * tokens
    tensors = {
        "prompt_ids": torch.from_numpy(rng.integers(0, 151_000, 10, np.int32)),
        "completion_ids": torch.from_numpy(rng.integers(0, 151_000, count, np.int32)),
        "advantages": torch.randn(8),
        "old_per_token_logps": torch.randn(count),
        "trl_replay_rewards": torch.randn(8, 1),
    }
    return Group(tensors, frozenset(tensors), np.array([10]), np.full(8, tokens))


@pytest.mark.parametrize(("tokens", "most"), [(7, 15.0), (50, 8.4)])
def test_70_memory_grows_by_little_more_than_what_is_told(tokens, most):
    """Two thousand groups, four a step."""
    store, rng = Store(10_000, size=8), np.random.default_rng(0)

    def add(first):
        serials = np.arange(first, first + 4)
        store.append({"serial": serials}, rng)
        store.table.rows_of(serials)
        store.receive({serial: pack(small(tokens, serial)) for serial in serials.tolist()})

    add(0)
    told = store.nbytes
    tracemalloc.start()
    try:
        for first in range(1_000, 3_000, 4):
            add(first)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    told = store.nbytes - told
    assert 0.9 * told <= grown <= 1.2 * told
    assert told / 2_000 / (8 * tokens + 10) <= most


@st.composite
def cuts(draw):
    """A batch of one group whose masks may be all ones in one part only, and where to cut it apart."""
    size = 6
    shared = draw(st.booleans())
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=size, max_size=size))
    if shared:
        lengths = [(lengths[0][0], completion) for _, completion in lengths]
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True))
    halves = [lengths[:3], lengths[3:]]
    batch = make_batch(halves, keys, draw(st.integers(0, 9)), [shared, shared])
    if shared:
        batch["prompt_ids"][:] = batch["prompt_ids"][0]
    if draw(st.booleans()):  # truncated completions in the first rows only
        batch["completion_mask"][: draw(st.integers(1, 5))] = 0
    borders = sorted({0, size, *draw(st.sets(st.integers(1, size - 1)))})
    return batch, [slice(begin, end) for begin, end in pairwise(borders)]


@settings(max_examples=80, deadline=None)
@given(cuts())
def test_parts_of_a_group_joined_are_the_group_cut_as_a_whole(given):
    batch, parts = given
    (whole,) = cut(batch, FIELDS, [slice(0, 6)])
    sent = [unpack(packed) for packed in from_bytes(to_bytes([pack(part) for part in cut(batch, FIELDS, parts)]))]
    assert_same(join(sent, FIELDS), whole)
