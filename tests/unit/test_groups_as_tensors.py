"""Groups as bytes, and groups put together from the parts that several processes have."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batches import EXTRA, KEYS, make_batch
from hypothesis import given, settings

from trl_replay.batch.compose import cut, join
from trl_replay.data.fields import FieldTable
from trl_replay.data.types import Group
from trl_replay.serialization.groups import from_bytes, to_bytes

DTYPES = (
    torch.int8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool,
    torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
NAMES = [f"key{number}" for number in range(19)]
FIELDS = FieldTable(0, extra=EXTRA)


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
        values = torch.cat([torch.empty(0, dtype=torch.uint8), torch.from_numpy(drawn)])
        tensors[key] = values.view(dtype).view(shape)
    return Group(tensors, frozenset(keys), prompts, completions)


@settings(max_examples=60, deadline=None)
@given(st.lists(groups(), max_size=3))
def test_groups_come_out_as_they_went_in_whatever_the_order_of_their_tensors(given):
    data = to_bytes(given)
    resumed = [replace(group, tensors=dict(reversed(group.tensors.items()))) for group in given]
    assert torch.equal(to_bytes(resumed), data)
    found = from_bytes(data)
    assert len(found) == len(given)
    for before, after in zip(given, found, strict=True):
        assert_same(before, after)


def test_what_is_unpacked_owns_its_memory():
    data = to_bytes([Group({"key0": torch.ones(3)}, frozenset(NAMES), np.array([2]), np.array([3]))])
    (group,) = from_bytes(data)
    data.zero_()
    assert group.tensors["key0"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("tokens", "share"), [(128, 0.12), (1024, 0.015)])
def test_names_and_lengths_take_less_than_a_kilobyte_of_a_group_of_eight(tokens, share):
    lengths = np.full(8, tokens)
    keys = frozenset(name for name in FIELDS.names if name != "num_items_in_batch")
    tensors = {
        "prompt_ids": torch.zeros(8, dtype=torch.int32),
        "completion_ids": torch.zeros(8 * tokens, dtype=torch.int32),
        "advantages": torch.zeros(8),
        "old_per_token_logps": torch.zeros(8 * tokens),
    }
    group = Group(tensors, keys, np.array([8]), lengths)
    values = sum(tensor.nbytes for tensor in tensors.values())
    assert len(to_bytes([group])) <= min((1 + share) * values, values + 1000)


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
    sent = from_bytes(to_bytes(cut(batch, FIELDS, parts)))
    assert_same(join(sent, FIELDS), whole)
