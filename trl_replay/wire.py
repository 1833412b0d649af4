"""Groups as bytes, for sending: self-describing, unpadded, no pickle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .errors import BatchError
from .types import Group

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
)
MAX_NAMES = 31


def packed_size(group: Group) -> int:
    """Bytes of `pack(group, names)`."""
    ints = 4 + 4 * len(group.tensors) + len(group.prompt_lengths) + len(group.completion_lengths)
    return 4 * ints + sum(tensor.numel() * tensor.element_size() for tensor in group.tensors.values())


def pack(group: Group, names: Sequence[str]) -> torch.Tensor:
    """The group as one flat uint8 tensor on the CPU.

    Args:
        group ([`Group`]): What to pack.
        names (`Sequence[str]`): All batch keys there can be, in an order that sender and receiver share.

    Raises:
        BatchError: A tensor of more than two dimensions, or more than 31 batch keys.
    """
    if len(names) > MAX_NAMES:
        raise BatchError(f"Groups of {len(names)} batch keys can't be sent; at most {MAX_NAMES} are possible.")
    keys = sum(1 << names.index(key) for key in group.keys)
    header = [len(group.tensors), len(group.prompt_lengths), len(group.completion_lengths), keys]
    for key, tensor in group.tensors.items():
        if tensor.dim() > 2:
            raise BatchError(
                f"{key!r} of shape {tuple(tensor.shape)} can't be sent; at most two dimensions are possible."
            )
        trailing = tensor.size(1) if tensor.dim() == 2 else -1
        header += [names.index(key), DTYPES.index(tensor.dtype), tensor.size(0), trailing]
    header += [*group.prompt_lengths.tolist(), *group.completion_lengths.tolist()]
    head = torch.tensor(header, dtype=torch.int32).view(torch.uint8)
    return torch.cat(
        [head, *(t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in group.tensors.values())]
    )


def unpack(data: torch.Tensor, names: Sequence[str]) -> list[Group]:
    """The groups that were packed one after the other into `data`; their tensors are copies.

    Args:
        data (`(bytes,)` uint8 tensor on the CPU): Packed groups.
        names (`Sequence[str]`): As given to `pack`.
    """
    groups = []
    position = 0
    while position < data.numel():
        tensors, prompts, completions, keys = _ints(data, position, 4)
        table = _ints(data, position + 16, 4 * tensors)
        position += 16 + 16 * tensors
        lengths = _ints(data, position, prompts + completions)
        position += 4 * (prompts + completions)
        unpacked: dict[str, torch.Tensor] = {}
        for name, dtype, size, trailing in zip(*[iter(table)] * 4, strict=True):
            count = size * (trailing if trailing >= 0 else 1)
            end = position + count * DTYPES[dtype].itemsize
            flat = data[position:end].clone().view(DTYPES[dtype])
            unpacked[names[name]] = flat.view(size, trailing) if trailing >= 0 else flat
            position = end
        held = frozenset(name for bit, name in enumerate(names) if keys >> bit & 1)
        groups.append(Group(unpacked, held, np.array(lengths[:prompts]), np.array(lengths[prompts:])))
    return groups


def _ints(data: torch.Tensor, position: int, count: int) -> list[int]:
    return [int(value) for value in data[position : position + 4 * count].clone().view(torch.int32).tolist()]
