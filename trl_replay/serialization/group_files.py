"""Groups in safetensors files, each packed as for sending. Used by checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ..data.types import Group
from .wire import pack, unpack


def write(path: Path, groups: Mapping[int, Group]) -> None:
    """Write groups, by serial, to one file."""
    save_file({str(serial): pack(group) for serial, group in groups.items()}, path)


def read(path: Path) -> Iterator[tuple[int, Group]]:
    """`(serial, group)` of one file, in memory of their own, by ascending serial, one after the other.

    Raises:
        Exception: Of several kinds, where the file is not what `write` made.
    """
    with safe_open(path, framework="pt") as file:
        for serial in sorted(map(int, file.keys())):
            (group,) = unpack(file.get_tensor(str(serial)))
            yield serial, group
