"""Groups as bytes, the same ones in memory, in files, and in messages between processes. No pickle."""

from __future__ import annotations

import json
import math
import operator
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from ..data.types import DTYPES, Group, GroupKind, Ints, Packed

INDEX, GROUPS = "index", "groups"
"""Names of two tensors: `GROUPS` holds the bytes of all groups, one after the other, and `INDEX`, as JSON, their
kinds, and each group's number, kind, number of bytes, and checksum."""
BY_NAME = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}
OF_NUMPY = {getattr(torch, name): np.dtype(name) for name in DTYPES if name != "bfloat16"}
NARROWED: dict[torch.dtype, Any] = {torch.int64: np.uint64, torch.int32: np.uint32, torch.int16: np.uint16}
"""Whose numbers take as few bytes as their largest one needs; seen as these, a negative one is large."""
BEHIND = bytes(8)
"""What follows the numbers, so that the last one can be read with bytes that it does not have."""


def pack(group: Group) -> Packed:
    """Pack a group; nothing is lost."""
    packed = {key: _as_bytes(tensor) for key, tensor in sorted(group.tensors.items())}
    tensors = tuple([(key, *of_numbers) for key, (_, of_numbers, _) in packed.items()])
    counts = [count for count, _, _ in packed.values()]
    lengths = np.concatenate([group.prompt_lengths, group.completion_lengths, counts]).astype(np.uint32)
    kind = GroupKind(group.keys, len(group.prompt_lengths), len(group.completion_lengths), tensors)
    return Packed(kind, b"".join([lengths.tobytes(), *[data for _, _, data in packed.values()], BEHIND]))


def _as_bytes(tensor: torch.Tensor) -> tuple[int, tuple[str, tuple[int, ...], int], bytes]:
    """A tensor's first dimension, what `GroupKind` tells of it, and its numbers."""
    dtype, (count, *shape) = tensor.dtype, tensor.shape
    values = (tensor if dtype in OF_NUMPY else tensor.unsqueeze(-1).view(torch.uint8)).numpy(force=True)
    width = dtype.itemsize
    if dtype in NARROWED:
        values = values.ravel()
        largest = int(np.maximum.reduce(values.view(NARROWED[dtype]), initial=0))
        width = (largest.bit_length() + 7) // 8 or 1
        values = np.ndarray(values.shape, f"V{width}", values, 0, values.strides)
    return count, (NAMES[dtype], tuple(shape), width), values.tobytes()


def unpack(packed: Packed) -> Group:
    """The group that was packed, in memory of its own.

    Raises:
        Exception: Of several kinds, where the bytes are not of this kind.
    """
    (keys, prompts, rows, _), data = packed
    tensors = {}
    lengths, parts = _layout(packed)
    for key, dtype, (count, *shape), begin, numbers, width in parts:
        if is_plain := dtype in OF_NUMPY and numbers > 0:
            values: NDArray[Any] = np.ndarray((numbers,), OF_NUMPY[dtype], data, begin, (width,))
            values = values & ((1 << 8 * width) - 1) if width < dtype.itemsize else values.copy()
        else:
            values = np.frombuffer(bytearray(data[begin : begin + numbers * width]), np.uint8)
        tensor = torch.from_numpy(values)
        tensors[key] = tensor if is_plain and not shape else tensor.view(dtype).view(count, *shape)
    return Group(tensors, keys, lengths[:prompts], lengths[prompts : prompts + rows])


def _layout(packed: Packed) -> tuple[Ints, list[tuple[str, torch.dtype, list[int], int, int, int]]]:
    """All lengths, and of each tensor its key, type and shape, where its numbers begin, how many they are, and the
    bytes of one.

    Raises:
        Exception: Of several kinds, where the bytes are not of this kind.
    """
    (_, prompts, rows, described), data = packed
    told = np.frombuffer(data, np.uint32, prompts + rows + len(described))
    parts, end, lengths = [], told.nbytes, told.astype(np.int64)
    for (key, name, shape, width), count in zip(described, lengths[prompts + rows :].tolist(), strict=True):
        dtype, begin, numbers = BY_NAME[name], end, count * math.prod(shape) if shape else count
        if not (1 if dtype in NARROWED else dtype.itemsize) <= width <= dtype.itemsize:
            raise ValueError(f"{name} can't have numbers of {width} bytes")
        end += numbers * width
        parts.append((key, dtype, [count, *shape], begin, numbers, width))
    if end + len(BEHIND) != len(data) or len({key for key, *_ in described}) < len(described):
        raise ValueError("a group has other bytes than is told of it")
    return lengths, parts


def to_tensors(payload: Mapping[int, Packed]) -> dict[str, torch.Tensor]:
    """Packed groups, by number, as tensors that safetensors holds: `INDEX` and `GROUPS`."""
    groups = sorted(payload.items())
    kinds: dict[GroupKind, int] = {}
    told = [
        (number, kinds.setdefault(kind, len(kinds)), len(data), zlib.crc32(data)) for number, (kind, data) in groups
    ]
    index = json.dumps([[(sorted(keys), *others) for keys, *others in kinds], told], separators=(",", ":"))
    return {INDEX: _flat(index.encode()), GROUPS: _flat(b"".join([data for _, (_, data) in groups]))}


def from_tensors(
    index: torch.Tensor, block: Any, size: int, wanted: Container[int] | None = None
) -> Iterator[tuple[int, Packed]]:
    """`(number, packed group)` by ascending number.

    Args:
        index (`(bytes,)` uint8): `INDEX`.
        block (`(size,)` uint8): `GROUPS`, or what reads it by slices: only what is wanted is read.
        size (`int`): Its length.
        wanted (`Container[int]`, *optional*): Numbers of the groups; all, if not given.

    Raises:
        Exception: Of several kinds, where the tensors are not what `to_tensors` made.
    """
    of_kinds, told = json.loads(index.numpy().tobytes())
    kinds = [
        GroupKind(
            frozenset(keys),
            prompts,
            rows,
            tuple((key, name, tuple(map(operator.index, shape)), width) for key, name, shape, width in tensors),
        )
        for keys, prompts, rows, tensors in of_kinds
    ]
    if sum(count for _, _, count, _ in told) != size or len({number for number, *_ in told}) < len(told):
        raise ValueError("there are other groups than the index tells")
    end = 0
    for number, kind, count, checksum in told:
        begin, end = end, end + count
        if wanted is not None and number not in wanted:
            continue
        packed = Packed(kinds[kind], block[begin:end].numpy().tobytes())
        if zlib.crc32(packed.data) != checksum:
            raise ValueError(f"the checksum of group {number} differs")
        _layout(packed)  # what can't be is told now
        yield number, packed


def to_bytes(groups: Sequence[Packed]) -> torch.Tensor:
    """Packed groups as one flat uint8 tensor; of none, empty."""
    return _flat(save(to_tensors(dict(enumerate(groups)))) if groups else b"")


def from_bytes(data: torch.Tensor) -> list[Packed]:
    """The groups that `to_bytes` was given, in its order."""
    if not len(data):
        return []
    tensors = load(data.numpy().tobytes())
    return [packed for _, packed in from_tensors(tensors[INDEX], tensors[GROUPS], len(tensors[GROUPS]))]


def _flat(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
