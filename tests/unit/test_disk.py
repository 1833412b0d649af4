"""The storage on disk: its room, its folder, its errors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from resuming import files

import trl_replay
from trl_replay import Group, StorageFullError
from trl_replay.strategies.disk import DiskStorage


def group_of(nbytes: int) -> Group:
    return Group({"x": torch.zeros(nbytes - 16, dtype=torch.uint8)}, frozenset({"x"}), np.array([1]), np.array([1]))


def test_the_folder_goes_with_its_storage_and_a_killed_processs_with_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom trl_replay.strategies.disk import DiskStorage\n"
        "kept = DiskStorage(sys.argv[1])\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(trl_replay.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    storage = DiskStorage(tmp_path)
    other = DiskStorage(tmp_path)
    assert not left.exists(), "its process has died"
    assert storage.folder.exists(), "this one lives"
    for each in (storage, other):
        each.put(1, group_of(100))
    folder = storage.folder
    del storage, each
    gc.collect()
    assert not folder.exists()
    assert other.get(1).nbytes == 100
    assert list(tmp_path.iterdir()) == [other.folder]


def test_a_storage_without_room_says_so(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, max_bytes=1000)
    with pytest.raises(StorageFullError, match="max_bytes=1000"):
        storage.put(1, group_of(5000))
    assert storage.nbytes == 0
    assert files(tmp_path) == []


def test_another_error_while_writing_is_raised(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    (storage.folder / "0").write_text("in the way")
    with pytest.raises(FileExistsError):
        storage.put(1, group_of(50))
