"""Groups as bytes, for sending: self-describing, unpadded, no pickle.

One packed group: the length of its header (4 bytes, little-endian); the header, compressed JSON of its keys, its
lengths, and per tensor name, dtype and shape; all values.
"""

from __future__ import annotations

import json
import math
import zlib

import numpy as np
import torch

from ..base.transfer import fetch
from ..data.types import Group

PREFIX = 4
"""Bytes of a header's length."""


def packed_size(group: Group) -> int:
    """Bytes of `pack(group)`."""
    return len(_header(group)) + sum(tensor.nbytes for tensor in group.tensors.values())


def pack(group: Group) -> torch.Tensor:
    """The group as one flat uint8 tensor on the CPU."""
    parts = [torch.frombuffer(_header(group), dtype=torch.uint8)]
    for _, tensor in sorted(fetch(group.tensors).items()):
        if tensor.numel():
            parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)


def unpack(data: torch.Tensor) -> list[Group]:
    """The groups that were packed one after the other into `data`, a flat uint8 tensor; their tensors are copies."""
    groups = []
    position = 0

    def take(count: int) -> torch.Tensor:
        nonlocal position
        position += count
        return data[position - count : position].clone()

    while position < len(data):
        size = int.from_bytes(take(PREFIX).numpy().tobytes(), "little")
        described = json.loads(zlib.decompress(take(size).numpy().tobytes()))
        tensors = {}
        for name, dtype, shape in described["tensors"]:
            kind: torch.dtype = getattr(torch, dtype)
            tensors[name] = take(math.prod(shape) * kind.itemsize).view(kind).view(shape)
        prompts, completions = (np.array(lengths, np.int64) for lengths in described["lengths"])
        groups.append(Group(tensors, frozenset(described["keys"]), prompts, completions))
    return groups


def _header(group: Group) -> bytearray:
    """All of a packed group but the values of its tensors."""
    described = {
        "keys": sorted(group.keys),
        "lengths": [group.prompt_lengths.tolist(), group.completion_lengths.tolist()],
        "tensors": [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in sorted(group.tensors.items())  # a group read from disk takes as many bytes
        ],
    }
    header = zlib.compress(json.dumps(described).encode())
    return bytearray(len(header).to_bytes(PREFIX, "little") + header)
