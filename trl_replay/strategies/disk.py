"""The storage `disk`: one safetensors file a group, mapped into memory only while it is read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigurationError, ReplayError, StorageFullError
from ..sizes import format_bytes, parse_bytes
from ..types import Group
from ..validation import optional, require, size_in_bytes

PREFIX = "trl_replay-"
LOCK = "lock"
FAN_OUT = 1000
"""Groups of which the files share a folder."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskStorage:
    """Keeps payloads in a folder of its own, which goes when the storage goes; a killed run's is removed by the next.

    A file leaves with its group. What outlives the run is the checkpoint, not this folder.

    Args:
        folder (`str` or `Path`): On a local disk with room; not `/tmp` where that is memory.
        max_bytes (`int` or `str`, *optional*): Most bytes of files; `"20GB"`. No limit but the disk's if not set.
    """

    on_cpu = True

    def __init__(self, folder: str | Path | None = None, max_bytes: int | str | None = None) -> None:
        if not folder:
            raise ConfigurationError("disk: name a folder on a disk with room: replay_storage_kwargs={'folder': …}.")
        require("disk: max_bytes", max_bytes, optional(size_in_bytes))
        self.max_bytes = parse_bytes(max_bytes)
        self.folder = _claim(Path(folder))
        self._nbytes = 0
        self._sizes: dict[int, int] = {}
        weakref.finalize(self, _give_back, self.folder, os.getpid())

    def put(self, serial: int, group: Group) -> None:
        """Writes a copy of `group`.

        Raises:
            StorageFullError: The disk or `max_bytes` has no room for it; nothing of it is left behind.
        """
        from ..serialization.group_files import write

        path = self._path(serial)
        try:
            path.parent.mkdir(exist_ok=True)
            write(path, {serial: group})
            size = path.stat().st_size
        except Exception as error:  # safetensors wraps the system's error in one of its own
            with suppress(OSError):
                path.unlink()
            if _is_full(error):
                raise StorageFullError(f"The disk of {self.folder} is full: {error}") from error
            raise
        if self.max_bytes is not None and self._nbytes + size > self.max_bytes:
            path.unlink()
            raise StorageFullError(
                f"{self.folder} holds {format_bytes(self._nbytes)}, and max_bytes={self.max_bytes}."
            )
        self._nbytes += size
        self._sizes[serial] = size

    def get(self, serial: int) -> Group:
        """Reads a fresh copy of the group.

        Raises:
            ReplayError: Its file is gone.
        """
        from ..serialization.group_files import read

        path = self._path(serial)
        if not path.is_file():
            raise ReplayError(f"{path} is gone: something else has deleted from the folder of replay_storage='disk'.")
        ((_, group),) = read(path)
        return group

    def remove(self, serial: int) -> None:
        """Deletes the group's file."""
        path = self._path(serial)
        self._nbytes -= self._sizes.pop(serial)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other groups' files are in it
            path.parent.rmdir()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._nbytes

    def _path(self, serial: int) -> Path:
        return self.folder / str(serial // FAN_OUT) / f"{serial}.safetensors"


def _is_full(error: Exception) -> bool:
    if getattr(error, "errno", None) in FULL:
        return True
    return any(f"os error {code}" in str(error) for code in FULL)


def _claim(parent: Path) -> Path:
    """A new folder in `parent`, locked as long as this process lives; folders whose process has died are removed."""
    import fcntl

    parent.mkdir(parents=True, exist_ok=True)
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), lock.open() as file:
            # fails while its process lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    unlocked = folder / "unlocked"  # a file called lock that nobody holds would be taken for a dead process's
    # kept open: the lock goes with the process
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unlocked.rename(folder / LOCK)
    _locks[folder] = descriptor
    return folder


_locks: dict[Path, int] = {}


def _give_back(folder: Path, process: int) -> None:
    if os.getpid() != process:  # a forked process has its own copy of the storage, not its own folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(_locks.pop(folder))
