"""Files of rows: which ones a path, a pattern, a folder, or a list of these means."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeGuard

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
    """Return the files that are meant, each once, those of a pattern or a folder by their names.

    Raises:
        ValueError: There is none for one of the paths, or none that can be read: says what to give.
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    return list(dict.fromkeys(file for path in given for file in _files(Path(path))))


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(ENDINGS))
    else:
        found = [path] if path.is_file() else _parts(path) or _matching(path)
    if not found:
        raise ValueError(f"give the path of a file that exists: {path} is none, nor a folder or a pattern of such")
    for file in found:
        if not file.name.endswith(ENDINGS):
            raise ValueError(f"give {KINDS}, not {file.name}")
        yield file


def _matching(path: Path) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def _parts(path: Path) -> list[Path]:
    """Return the files of all processes of an export to this path, which itself does not exist."""
    found = sorted(path.parent.glob(f"{glob.escape(path.stem)}-?????-of-?????{path.suffix}"))
    return found if found and found[-1].stem.endswith(f"-of-{len(found):05d}") else []
