"""A checkpoint to read, and a copy of it to damage."""

import shutil
from pathlib import Path

import pytest
from resuming import last, train


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of six updates with a full buffer. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, max_steps=6)
    return Path(last(folder))


@pytest.fixture
def copied(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-6"))
