"""Groups as bytes, the same ones in memory, in files, and in messages between processes. No pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from ..data.fields import DTYPES
from ..data.types import Group, Kind, Packed

INDEX, GROUPS = "index", "groups"
"""Names of two tensors: `GROUPS` holds the bytes of all groups, one after the other, and `INDEX`, as JSON, their
kinds, and each group's number, kind, and bytes."""
NUMPY = {getattr(torch, name) for name in DTYPES} - {torch.bfloat16}
NARROWED = (torch.int64, torch.int32, torch.int16)
"""Whose numbers take as few bytes as their largest one needs."""
BY_NAME = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
LENGTH = np.dtype(np.uint32)


def pack(group: Group) -> Packed:
    """Pack a group; nothing is lost."""
    lengths = [*group.prompt_lengths.tolist(), *group.completion_lengths.tolist()]
    tensors, parts = [], []
    for key, tensor in sorted(group.tensors.items(), key=_place):
        dtype, (count, *shape) = tensor.dtype, tensor.shape
        values = (tensor if dtype in NUMPY else tensor.reshape(-1).view(torch.uint8)).numpy(force=True)
        width, part = _narrow(values.ravel()) if dtype in NARROWED else (dtype.itemsize, values.tobytes())
        tensors.append((key, dtype, tuple(shape), width))
        lengths.append(count)
        parts.append(part)
    kind = Kind(group.keys, len(group.prompt_lengths), len(group.completion_lengths), tuple(tensors))
    return Packed(kind, np.array(lengths, LENGTH).tobytes() + b"".join(parts))


def unpack(packed: Packed) -> Group:
    """The group that was packed, in memory of its own.

    Raises:
        Exception: Of several kinds, where the bytes are not of this kind.
    """
    (keys, prompts, rows, described), data = packed
    lengths = np.frombuffer(data, LENGTH, prompts + rows + len(described)).astype(np.int64)
    values = np.frombuffer(bytearray(data[len(lengths) * LENGTH.itemsize :]), np.uint8)  # tensors begin aligned in it
    tensors, end = {}, 0
    for (key, dtype, shape, width), count in zip(described, lengths[prompts + rows :].tolist(), strict=True):
        begin, end = end, end + width * count * math.prod(shape)
        part = _widen(values[begin:end], width, dtype.itemsize) if dtype in NARROWED else values[begin:end]
        tensors[key] = torch.from_numpy(part).view(dtype).view(count, *shape)
    if end != len(values) or len(tensors) < len(described):
        raise ValueError("a group has other bytes than is told of it")
    return Group(tensors, keys, lengths[:prompts], lengths[prompts : prompts + rows])


def to_tensors(payload: Mapping[int, Packed]) -> dict[str, torch.Tensor]:
    """Packed groups, by number, as tensors that safetensors holds: `INDEX` and `GROUPS`."""
    groups = sorted(payload.items())
    kinds: dict[Kind, int] = {}
    told = [(number, kinds.setdefault(kind, len(kinds)), len(data)) for number, (kind, data) in groups]
    of_kinds = [
        (
            sorted(kind.keys),
            kind.prompts,
            kind.rows,
            [(key, str(dtype), *others) for key, dtype, *others in kind.tensors],
        )
        for kind in kinds
    ]
    index = json.dumps([of_kinds, told], separators=(",", ":"))
    return {INDEX: _flat(index.encode()), GROUPS: _flat(b"".join([data for _, (_, data) in groups]))}


def from_tensors(get: Callable[[str], torch.Tensor]) -> Iterator[tuple[int, Packed]]:
    """`(number, packed group)` by ascending number.

    Args:
        get (`Callable`): Gives a tensor by its name.

    Raises:
        Exception: Of several kinds, where the tensors are not what `to_tensors` made.
    """
    of_kinds, told = json.loads(get(INDEX).numpy().tobytes())
    kinds = []
    for keys, prompts, rows, tensors in of_kinds:
        described = [(key, BY_NAME[dtype], tuple(shape), width) for key, dtype, shape, width in tensors]
        kinds.append(Kind(frozenset(keys), prompts, rows, tuple(described)))
    block, end = get(GROUPS).numpy(), 0
    if sum(size for *_, size in told) != len(block) or len({number for number, *_ in told}) < len(told):
        raise ValueError("there are other groups than the index tells")
    for number, kind, size in told:
        begin, end = end, end + size
        packed = Packed(kinds[kind], block[begin:end].tobytes())
        unpack(packed)  # what can't be is told now
        yield number, packed


def to_bytes(groups: Sequence[Packed]) -> torch.Tensor:
    """Packed groups as one flat uint8 tensor; of none, empty."""
    return _flat(save(to_tensors(dict(enumerate(groups)))) if groups else b"")


def from_bytes(data: torch.Tensor) -> list[Packed]:
    """The groups that `to_bytes` was given, in its order."""
    return [packed for _, packed in from_tensors(load(data.numpy().tobytes()).__getitem__)] if len(data) else []


def _flat(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _place(item: tuple[str, torch.Tensor]) -> tuple[bool, int, str]:
    """Where a tensor stands among others: what is read in place begins at a multiple of its numbers' bytes."""
    key, tensor = item
    return tensor.dtype in NARROWED, -tensor.dtype.itemsize, key


def _narrow(numbers: NDArray[Any]) -> tuple[int, bytes]:
    """Integers without bytes that are 0 in all of them: how many each has left; and the lowest byte of all, then the
    next ones."""
    largest = int(numbers.view(f"u{numbers.itemsize}").max(initial=0))  # seen so, a negative one is large
    width = max(-(-largest.bit_length() // 8), 1)
    return width, numbers.view(np.uint8).reshape(-1, numbers.itemsize).T[:width].tobytes()


def _widen(part: NDArray[np.uint8], width: int, size: int) -> NDArray[np.uint8]:
    """The integers of `size` bytes that `_narrow` was given, as bytes."""
    wide = np.zeros((len(part) // width, size), np.uint8)
    wide.T[:width] = part.reshape(width, -1)
    return wide.ravel()
