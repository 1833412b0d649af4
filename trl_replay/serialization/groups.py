"""Groups as tensors that safetensors holds, in files and in messages between processes. No pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from ..base.transfer import fetch
from ..data.types import Group

DESCRIPTION = ""
"""Takes a key's place in the name of the tensor that holds a group's keys and lengths, as JSON."""


def to_tensors(groups: Mapping[int, Group]) -> dict[str, torch.Tensor]:
    """CPU tensors of groups, named `number/key`."""
    tensors: dict[str, torch.Tensor] = {}
    for number, group in groups.items():
        described = {
            "keys": sorted(group.keys),
            "lengths": [group.prompt_lengths.tolist(), group.completion_lengths.tolist()],
        }
        text = bytearray(json.dumps(described, separators=(",", ":")).encode())
        held = {DESCRIPTION: torch.frombuffer(text, dtype=torch.uint8), **fetch(group.tensors)}
        tensors |= {f"{number}/{key}": tensor.contiguous() for key, tensor in held.items()}
    return tensors


def from_tensors(names: Iterable[str], get: Callable[[str], torch.Tensor]) -> Iterator[tuple[int, Group]]:
    """`(number, group)` in memory of their own, by ascending number, one after the other.

    Args:
        names (`Iterable[str]`): Of tensors; those without a slash are no group's.
        get (`Callable`): Gives a tensor by its name.

    Raises:
        Exception: Of several kinds, where the tensors are not what `to_tensors` made.
    """
    keys: dict[int, list[str]] = {}
    for name in names:
        before, slash, key = name.partition("/")
        if slash:
            keys.setdefault(int(before), []).append(key)
    for number in sorted(keys):
        held = {key: get(f"{number}/{key}").clone() for key in keys[number]}
        described: dict[str, Any] = json.loads(held.pop(DESCRIPTION).numpy().tobytes())
        prompts, completions = (np.array(lengths, np.int64) for lengths in described["lengths"])
        yield number, Group(held, frozenset(described["keys"]), prompts, completions)


def to_bytes(groups: Sequence[Group]) -> torch.Tensor:
    """The groups as one flat uint8 tensor; of none, empty."""
    data = save(to_tensors(dict(enumerate(groups)))) if groups else b""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def from_bytes(data: torch.Tensor) -> list[Group]:
    """The groups that `to_bytes` was given, in its order."""
    tensors = load(data.numpy().tobytes()) if len(data) else {}
    return [group for _, group in from_tensors(tensors, tensors.__getitem__)]
