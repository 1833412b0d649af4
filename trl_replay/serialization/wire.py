"""Groups as bytes, for sending: self-describing, unpadded, no pickle.

One packed group, little-endian: one byte, 1 if lengths take 4 bytes and 0 if 2; the group's keys and the keys that
have a tensor, one bit a batch key; the numbers of prompt and completion lengths (2 bytes each) and these lengths; per
tensor its dtype and its shape (1 byte each, then 4 bytes a dimension where the lengths do not tell it); all values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import BatchError
from ..transfer import fetch
from ..types import Group, Ints

DTYPES = (
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
PER_COMPLETION_TOKEN = 255
PER_PROMPT_TOKEN = 254
PER_ROW = 253
"""Shape codes of flat tensors with one value a token or row; other codes are numbers of dimensions."""
BYTE = np.dtype("u1")
SMALL = np.dtype("<u2")
LARGE = np.dtype("<u4")
SIZE = np.dtype("<u4")


def packed_size(group: Group, names: Sequence[str]) -> int:
    """Bytes of `pack(group, names)`.

    Raises:
        BatchError: As `pack`.
    """
    header = _header(group, names)
    values = sum(tensor.numel() * tensor.element_size() for tensor in group.tensors.values())
    return int(len(header) + values)


def pack(group: Group, names: Sequence[str]) -> torch.Tensor:
    """The group as one flat uint8 tensor on the CPU.

    Args:
        group ([`Group`]): What to pack.
        names (`Sequence[str]`): All batch keys there can be, in an order that sender and receiver share.

    Raises:
        BatchError: A tensor of a dtype that can't be sent, or a key that is not among `names`.
    """
    header = bytearray(_header(group, names))
    parts = [torch.frombuffer(header, dtype=torch.uint8)]
    tensors = fetch(group.tensors)
    for name in names:
        tensor = tensors.get(name)
        if tensor is not None and tensor.numel():
            parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)


def unpack(data: torch.Tensor, names: Sequence[str]) -> list[Group]:
    """The groups that were packed one after the other into `data`; their tensors are copies.

    Args:
        data (`(bytes,)` uint8 tensor on the CPU): Packed groups.
        names (`Sequence[str]`): As given to `pack`.
    """
    groups = []
    reader = _Reader(data)
    while reader.position < data.numel():
        groups.append(_read_group(reader, names))
    return groups


def _read_group(reader: _Reader, names: Sequence[str]) -> Group:
    """The next group; reads in the order in which `_header` writes."""
    (wide,) = reader.numbers(1, BYTE)
    keys = _read_names(reader, names)
    held = _read_names(reader, names)
    prompt_count, completion_count = reader.numbers(2, SMALL).tolist()
    prompts = _read_lengths(reader, prompt_count, bool(wide))
    completions = _read_lengths(reader, completion_count, bool(wide))
    shapes = [_read_shape(reader, prompts, completions) for _ in held]
    tensors = {}
    for name, (dtype, shape) in zip(held, shapes, strict=True):
        tensors[name] = reader.tensor(dtype, shape)
    return Group(tensors, frozenset(keys), prompts, completions)


def _header(group: Group, names: Sequence[str]) -> bytes:
    """All of a packed group but the values of its tensors."""
    undeclared = group.keys - set(names)
    if undeclared:
        raise BatchError(f"Nobody declared {sorted(undeclared)}: these batch keys can't be sent.")
    prompts = group.prompt_lengths
    completions = group.completion_lengths
    lengths = np.concatenate([prompts, completions])
    wide = int(lengths.max(initial=0)) > np.iinfo(SMALL).max
    lengths_dtype = LARGE if wide else SMALL
    counts = np.array([len(prompts), len(completions)], SMALL)
    parts = [
        bytes([wide]),
        _mask(group.keys, names),
        _mask(group.tensors, names),
        counts.tobytes(),
        lengths.astype(lengths_dtype).tobytes(),
    ]
    for name in names:
        if name in group.tensors:
            parts.append(_shape(name, group.tensors[name], prompts, completions))
    return b"".join(parts)


def _shape(name: str, tensor: torch.Tensor, prompts: Ints, completions: Ints) -> bytes:
    """A tensor's dtype and shape."""
    if tensor.dtype not in DTYPES:
        raise BatchError(f"{name!r} of dtype {tensor.dtype} can't be sent: no code stands for it.")
    dtype = DTYPES.index(tensor.dtype)
    code = _shape_code(tensor, prompts, completions)
    if code is not None:
        return bytes([dtype, code])
    dimensions = np.array(tensor.shape, SIZE)
    return bytes([dtype, tensor.dim()]) + dimensions.tobytes()


def _shape_code(tensor: torch.Tensor, prompts: Ints, completions: Ints) -> int | None:
    """The code of a flat tensor whose size the lengths tell; None for any other shape."""
    if tensor.dim() != 1:
        return None
    size = tensor.numel()
    if size == completions.sum():
        return PER_COMPLETION_TOKEN
    if size == prompts.sum():
        return PER_PROMPT_TOKEN
    if size == len(completions):
        return PER_ROW
    return None


def _read_shape(reader: _Reader, prompts: Ints, completions: Ints) -> tuple[torch.dtype, list[int]]:
    """The next tensor's dtype and shape."""
    dtype, code = reader.numbers(2, BYTE).tolist()
    told_by_lengths = {
        PER_COMPLETION_TOKEN: int(completions.sum()),
        PER_PROMPT_TOKEN: int(prompts.sum()),
        PER_ROW: len(completions),
    }
    if code in told_by_lengths:
        return DTYPES[dtype], [told_by_lengths[code]]
    return DTYPES[dtype], reader.numbers(code, SIZE).tolist()


def _read_lengths(reader: _Reader, count: int, wide: bool) -> Ints:
    lengths = reader.numbers(count, LARGE if wide else SMALL)
    return lengths.astype(np.int64)


def _mask(held: Container[str], names: Sequence[str]) -> bytes:
    """One bit a name: whether `held` contains it."""
    return np.packbits([name in held for name in names]).tobytes()


def _read_names(reader: _Reader, names: Sequence[str]) -> list[str]:
    """The names whose bits are set in the next mask."""
    mask = reader.numbers(math.ceil(len(names) / 8), BYTE)
    bits = np.unpackbits(mask.astype(BYTE))
    return [name for name, bit in zip(names, bits, strict=False) if bit]


class _Reader:
    """Reads numbers and tensors one after the other from packed bytes."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._bytes = data.numpy()
        self.position = 0

    def numbers(self, count: int, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """The next `count` numbers."""
        begin = self.position
        self.position += count * dtype.itemsize
        taken = self._bytes[begin : self.position]
        return np.frombuffer(taken.tobytes(), dtype)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The next tensor, in memory of its own."""
        begin = self.position
        self.position += math.prod(shape) * dtype.itemsize
        copied = self._data[begin : self.position].clone()
        return copied.view(dtype).view(list(shape))
