"""Files that are read or replaced: only regular ones, also of a path or a folder."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeGuard

from ..errors import ReplayError


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
