"""Groups as tensors that safetensors holds, in files and in messages between processes. No pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from ..base.transfer import fetch
from ..data.types import Group

INDEX = "index"
"""Name of the tensor that holds, as JSON: sets of keys; each group's number, set, and lengths; and by the name of each
block, whose rows follow each other in it (null: all groups'), and how many."""


def to_tensors(groups: Mapping[int, Group]) -> dict[str, torch.Tensor]:
    """CPU tensors of groups: their `INDEX`, and blocks, named `number/key`. A block holds one key of all groups that
    have it in the same dtype and shape of a row."""
    keysets: dict[frozenset[str], int] = {}
    described = []
    parts: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
    for number, group in sorted(groups.items()):
        keyset = keysets.setdefault(group.keys, len(keysets))
        described.append([number, keyset, group.prompt_lengths.tolist(), group.completion_lengths.tolist()])
        for key, tensor in group.tensors.items():
            kind = key, tensor.dtype, tensor.shape[1:], tensor.device
            parts.setdefault(kind, {})[number] = tensor
    blocks: dict[str, torch.Tensor] = {}
    rows = {}
    for kind in sorted(parts, key=str):  # whatever the order of a group's tensors
        held, name = parts[kind], f"{len(blocks)}/{kind[0]}"
        blocks[name] = torch.cat(list(held.values()))
        numbers = None if len(held) == len(groups) else list(held)
        rows[name] = numbers, [tensor.shape[0] for tensor in held.values()]
    index = [sorted(keys) for keys in keysets], described, rows
    text = bytearray(json.dumps(index, separators=(",", ":")).encode())
    return {INDEX: torch.frombuffer(text, dtype=torch.uint8), **fetch(blocks)}


def from_tensors(get: Callable[[str], torch.Tensor]) -> Iterator[tuple[int, Group]]:
    """`(number, group)` by ascending number, in memory of their own.

    Args:
        get (`Callable`): Gives a tensor by its name.

    Raises:
        Exception: Of several kinds, where the tensors are not what `to_tensors` made.
    """
    split: Any = torch.split_with_sizes_copy  # torch says that it returns nothing
    keysets, described, blocks = json.loads(get(INDEX).numpy().tobytes())
    keysets = [frozenset(keys) for keys in keysets]
    held: dict[int, dict[str, torch.Tensor]] = {number: {} for number, *_ in described}
    for name, (numbers, lengths) in blocks.items():
        key = name.partition("/")[2]
        having = held.values() if numbers is None else [held[number] for number in numbers]
        for tensors, rows in zip(having, split(get(name), lengths), strict=True):
            if tensors.setdefault(key, rows) is not rows:
                raise ValueError(f"a group has {key!r} twice")
    for number, keyset, prompts, completions in described:
        of_rows = np.array(prompts, np.int64), np.array(completions, np.int64)
        yield number, Group(held.pop(number), keysets[keyset], *of_rows)


def to_bytes(groups: Sequence[Group]) -> torch.Tensor:
    """The groups as one flat uint8 tensor; of none, empty."""
    data = save(to_tensors(dict(enumerate(groups)))) if groups else b""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def from_bytes(data: torch.Tensor) -> list[Group]:
    """The groups that `to_bytes` was given, in its order."""
    return [group for _, group in from_tensors(load(data.numpy().tobytes()).__getitem__)] if len(data) else []
