"""Which checkpoint is the newest whole one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from resuming import build, train

import trl_replay


def test_a_half_written_checkpoint_is_never_taken_for_whole(tmp_path: Path, checkpoint: Path) -> None:
    for number, cut in enumerate(["trainer_state.json", "optimizer.pt", "model.safetensors"], start=10):
        folder = Path(shutil.copytree(checkpoint, tmp_path / f"checkpoint-{number}"))
        path = folder / cut
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert trl_replay.last_complete_checkpoint(tmp_path) is None, cut
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-20"))
    (folder / "trainer_state.json").unlink()
    assert trl_replay.last_complete_checkpoint(tmp_path) is None
    shutil.copytree(checkpoint, tmp_path / "checkpoint-9")
    assert trl_replay.last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    assert trl_replay.last_complete_checkpoint(tmp_path) is None
    assert trl_replay.last_complete_checkpoint(tmp_path / "nowhere") is None


def test_a_folder_with_the_trainers_own_mark_of_an_unfinished_checkpoint_is_not_whole(copied: Path) -> None:
    """A checkpoint on SIGTERM (`enable_jit_checkpoint`) may write over a whole one."""
    assert trl_replay.last_complete_checkpoint(copied.parent) == str(copied)
    (copied / "checkpoint-is-incomplete.txt").touch()
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


@pytest.mark.parametrize("name", ["rng_state.pth", "trl_replay/rank-00000/payload-00000.safetensors",
                                  "trl_replay/rank-00000/state.json"])  # fmt: skip
def test_a_checkpoint_that_lacks_a_file_is_not_whole(copied: Path, name: str) -> None:
    (copied / name).unlink()
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


def test_what_trl_writes_after_the_trainers_state_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    """TRL's entropy controller is saved last of all."""
    trainer = build(tmp_path, max_steps=6, use_adaptive_entropy=True)
    train(tmp_path, trainer=trainer)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "entropy_ctrl_state.json").unlink()
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


def test_a_checkpoint_of_the_model_alone_is_whole(tmp_path: Path) -> None:
    train(tmp_path, max_steps=6, save_only_model=True)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
