"""Files that anybody may have written: only regular ones are read, and names in them lead nowhere else."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


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
