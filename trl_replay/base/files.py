"""Files that are read or replaced: only regular ones, also of a path or a folder."""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeGuard

from ..errors import ReplayError


def in_json(value: Any) -> Any:
    """Return a value as JSON holds it, else its text: a path, a strategy's name, an infinite number. No text shows an
    object's address."""
    if isinstance(value, Mapping):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    if isinstance(value, set | frozenset):  # whose order differs from process to process
        return sorted(map(in_json, value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return getattr(value, "__qualname__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return value


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(value: object) -> int | None:
    """Bytes of `512`, `"512MB"`, `"1.5 GiB"`; None if it is no size of at least one byte."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    match = SIZE.fullmatch(str(value).strip())
    if match is None:
        return None
    number = float(match[1])
    unit = match[2].upper()
    if unit not in UNITS:
        return None
    return int(number * UNITS[unit]) or None


def format_bytes(nbytes: float) -> str:
    """`nbytes` in the largest decimal unit that leaves a number of at least 1."""
    for unit in ("TB", "GB", "MB", "KB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.3g} {unit}"
    return f"{nbytes:.0f} B"


def counted(number: object, noun: str) -> str:
    """A number with its noun: `1 group`, `2 groups`.

    Args:
        number: Of them.
        noun (`str`): One of them; several have an s.
    """
    return f"{number} {noun}" + "s" * (number != 1)


def named_in(folder: Path, name: str) -> Path:
    """Return the file of a folder that another file names.

    Raises:
        ValueError: The name leads out of the folder.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or Path(name).is_absolute():
        raise ValueError(f"{name!r} is no name of a file in {folder}")
    return folder / parts


def regular(path: Path) -> Path:
    """Return the path of a file, which a link may lead to. A device may have no end, and a pipe lets its reader wait.

    Raises:
        OSError: There is none, or none that is regular.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; once all is written, the file takes the place of what was at `path`. A link that stands
    there is replaced, not followed.

    Raises:
        ReplayError: A folder, device, or pipe is there.
    """
    if path.exists() and not path.is_file():
        raise ReplayError(f"{path} is no regular file: give another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:  # nobody else's
        part = Path(folder) / path.name
        yield part
        part.replace(path)


ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
"""Of files that can be read."""
KINDS = "a .parquet, .jsonl, .json, or .csv file (the last three also with .gz)"

Paths: TypeAlias = str | Path | Sequence[str | Path]


def are_paths(value: object) -> TypeGuard[Paths]:
    """Tell a path, or a list of paths, from anything else."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(path, str | Path) and str(path) for path in value)
    return isinstance(value, str | Path) and bool(str(value))


def data_files(paths: Paths) -> list[Path]:
    """Return the files that are meant, each once, those of a folder by their names.

    Raises:
        ValueError: There is none for one of the paths, or none that can be read: says what to give.
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    return list(dict.fromkeys(file for path in given for file in _files(Path(path))))


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(ENDINGS))
    else:
        found = [path] if path.is_file() else _parts(path)
    if not found:
        raise ValueError(f"give the path of a file that exists: {path} is none, nor a folder of such")
    for file in found:
        if not file.name.endswith(ENDINGS):
            raise ValueError(f"give {KINDS}, not {file.name}")
        yield file


def _parts(path: Path) -> list[Path]:
    """Return the files of all processes of an export to this path, which itself does not exist."""
    found = sorted(path.parent.glob(f"{glob.escape(path.stem)}-?????-of-?????{path.suffix}"))
    return found if found and found[-1].stem.endswith(f"-of-{len(found):05d}") else []
