"""Files in folders where anybody may write: only regular ones are read or replaced, and names in them lead nowhere
else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

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
