"""Groups in safetensors files: named tensors, no pickle. Used by checkpoints and by the storage `disk`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..types import Group

PROMPTS = "#prompt_lengths"
COMPLETIONS = "#completion_lengths"


def named(serial: int, group: Group) -> dict[str, torch.Tensor]:
    """The group's tensors and lengths under names that start with its serial; on the CPU, in memory of their own."""
    tensors = group.tensors | {
        PROMPTS: torch.from_numpy(group.prompt_lengths),
        COMPLETIONS: torch.from_numpy(group.completion_lengths),
    }
    copies = {}
    for name, tensor in tensors.items():
        copied = tensor.detach().to("cpu", copy=True)
        copies[f"{serial}/{name}"] = copied.contiguous()
    return copies


def write(path: Path, groups: Mapping[int, Group]) -> None:
    """Writes groups, by serial, to one file."""
    tensors: dict[str, torch.Tensor] = {}
    for serial, group in groups.items():
        tensors |= named(serial, group)
    keys = {str(serial): sorted(group.keys) for serial, group in groups.items()}
    save_file(tensors, path, {"keys": json.dumps(keys)})


def read(path: Path) -> Iterator[tuple[int, Group]]:
    """`(serial, group)` of one file, in memory of their own, one after the other.

    Raises:
        Exception: Of several kinds, where the file is not what `write` made.
    """
    with safe_open(path, framework="pt") as file:
        names: dict[str, list[str]] = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            serial, _, key = name.partition("/")
            names.setdefault(serial, []).append(key)
        keys_of = json.loads(file.metadata()["keys"])
        for serial, keys in keys_of.items():
            tensors = {}
            for name in names[serial]:
                mapped = file.get_tensor(f"{serial}/{name}")
                tensors[name] = mapped.clone()
            prompts = tensors.pop(PROMPTS).numpy()
            completions = tensors.pop(COMPLETIONS).numpy()
            group = Group(tensors, frozenset(keys), prompts, completions)
            yield int(serial), group
