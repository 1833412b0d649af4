"""Groups as bytes, for sending: self-describing, unpadded, no pickle.

One packed group, little-endian: one byte, 1 if lengths take 4 bytes and 0 if 2; the group's keys and the keys that
have a tensor, one bit a batch key; the numbers of prompt and completion lengths (2 bytes each) and these lengths; per
tensor its dtype and its shape (1 byte each, then 4 bytes a dimension where the lengths do not tell it); all values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import BatchError
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
PER_COMPLETION_TOKEN, PER_PROMPT_TOKEN, PER_ROW = 255, 254, 253
"""Shape codes of flat tensors with one value a token or row; other codes are numbers of dimensions."""
SMALL, LARGE, SIZE = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u4")


def packed_size(group: Group, names: Sequence[str]) -> int:
    """Bytes of `pack(group, names)`.

    Raises:
        BatchError: As `pack`.
    """
    values = sum(tensor.numel() * tensor.element_size() for tensor in group.tensors.values())
    return int(len(_header(group, names)) + values)


def pack(group: Group, names: Sequence[str]) -> torch.Tensor:
    """The group as one flat uint8 tensor on the CPU.

    Args:
        group ([`Group`]): What to pack.
        names (`Sequence[str]`): All batch keys there can be, in an order that sender and receiver share.

    Raises:
        BatchError: A tensor of a dtype that can't be sent, or a key that is not among `names`.
    """
    head = torch.frombuffer(bytearray(_header(group, names)), dtype=torch.uint8)
    held = [group.tensors[name] for name in names if name in group.tensors and group.tensors[name].numel()]
    return torch.cat(
        [
            head,
            *(tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in held),
        ]
    )


def unpack(data: torch.Tensor, names: Sequence[str]) -> list[Group]:
    """The groups that were packed one after the other into `data`; their tensors are copies.

    Args:
        data (`(bytes,)` uint8 tensor on the CPU): Packed groups.
        names (`Sequence[str]`): As given to `pack`.
    """
    groups, reader = [], _Reader(data)
    while reader.position < data.numel():
        lengths_dtype = LARGE if reader.numbers(1, np.dtype("u1"))[0] else SMALL
        keys, held = (_names(reader.numbers(_mask_bytes(names), np.dtype("u1")), names) for _ in range(2))
        counts = reader.numbers(2, SMALL)
        prompts, completions = (reader.numbers(int(count), lengths_dtype).astype(np.int64) for count in counts)
        shapes = [(name, *_read_shape(reader, prompts, completions)) for name in held]
        tensors = {name: reader.tensor(dtype, shape) for name, dtype, shape in shapes}
        groups.append(Group(tensors, frozenset(keys), prompts, completions))
    return groups


def _header(group: Group, names: Sequence[str]) -> bytes:
    if not group.keys <= set(names):
        raise BatchError(f"Nobody declared {sorted(group.keys - set(names))}: these batch keys can't be sent.")
    lengths = np.concatenate([group.prompt_lengths, group.completion_lengths])
    wide = len(lengths) > 0 and int(lengths.max()) > np.iinfo(SMALL).max
    shapes = [
        _shape(
            name,
            group.tensors[name],
            group.prompt_lengths,
            group.completion_lengths,
        )
        for name in names
        if name in group.tensors
    ]
    return b"".join(
        [
            bytes([wide]),
            _mask(group.keys, names),
            _mask(group.tensors, names),
            np.array(
                [len(group.prompt_lengths), len(group.completion_lengths)],
                SMALL,
            ).tobytes(),
            lengths.astype(LARGE if wide else SMALL).tobytes(),
            *shapes,
        ]
    )


def _shape(name: str, tensor: torch.Tensor, prompts: Ints, completions: Ints) -> bytes:
    if tensor.dtype not in DTYPES:
        raise BatchError(f"{name!r} of dtype {tensor.dtype} can't be sent: no code stands for it.")
    flat = {len(completions): PER_ROW, int(prompts.sum()): PER_PROMPT_TOKEN}
    flat[int(completions.sum())] = PER_COMPLETION_TOKEN
    code = flat.get(tensor.numel()) if tensor.dim() == 1 else None
    dimensions = b"" if code is not None else np.array(tensor.shape, SIZE).tobytes()
    return bytes([DTYPES.index(tensor.dtype), tensor.dim() if code is None else code]) + dimensions


def _read_shape(reader: _Reader, prompts: Ints, completions: Ints) -> tuple[torch.dtype, list[int]]:
    dtype, code = reader.numbers(2, np.dtype("u1")).tolist()
    sizes = {
        PER_COMPLETION_TOKEN: int(completions.sum()),
        PER_PROMPT_TOKEN: int(prompts.sum()),
        PER_ROW: len(completions),
    }
    return DTYPES[dtype], [sizes[code]] if code in sizes else reader.numbers(code, SIZE).tolist()


def _mask_bytes(names: Sequence[str]) -> int:
    return -(-len(names) // 8)


def _mask(held: object, names: Sequence[str]) -> bytes:
    """One bit a name: whether `held` contains it."""
    return np.packbits([name in held for name in names]).tobytes()  # type: ignore[operator]


def _names(mask: NDArray[np.uint8], names: Sequence[str]) -> list[str]:
    return [name for name, bit in zip(names, np.unpackbits(mask), strict=False) if bit]


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
        return np.frombuffer(self._bytes[begin : self.position].tobytes(), dtype)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The next tensor, in memory of its own."""
        begin = self.position
        self.position += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._data[begin : self.position].clone().view(dtype).view(list(shape))
