"""The newest complete checkpoint."""

import os
import shutil
from pathlib import Path

import pytest
from resuming import build, train

import trl_replay
from trl_replay.checkpoint import discovery


def test_a_half_written_checkpoint_is_never_taken_for_whole(tmp_path, checkpoint):
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


def test_without_checkpoints_there_is_none(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    assert trl_replay.last_complete_checkpoint(tmp_path) is None
    assert trl_replay.last_complete_checkpoint(tmp_path / "nowhere") is None


def test_a_folder_with_the_trainers_own_mark_of_an_unfinished_checkpoint_is_not_whole(copied):
    """A checkpoint on SIGTERM (`enable_jit_checkpoint`) may write over a whole one."""
    assert trl_replay.last_complete_checkpoint(copied.parent) == str(copied)
    (copied / "checkpoint-is-incomplete.txt").touch()
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


@pytest.mark.parametrize("name", ["rng_state.pth", "trl_replay/rank-00000/payload-00000.safetensors",
                                  "trl_replay/rank-00000/state.json"])  # fmt: skip
def test_a_checkpoint_that_lacks_a_file_is_not_whole(copied, name):
    (copied / name).unlink()
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


def test_what_trl_writes_after_the_trainers_state_is_waited_for(tmp_path, monkeypatch):
    """TRL's entropy controller is saved last of all."""
    trainer = build(tmp_path, max_steps=6, use_adaptive_entropy=True)
    train(tmp_path, trainer=trainer)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "entropy_ctrl_state.json").unlink()
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


def test_a_checkpoint_of_the_model_alone_is_whole(tmp_path):
    train(tmp_path, max_steps=6, save_only_model=True)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")


@pytest.mark.parametrize("name", ["checkpoint-best-99", "checkpoint-old-99", "checkpoint-99-old", "checkpoint-x99"])
def test_63_a_copy_under_another_name_is_no_step_of_the_run(tmp_path, checkpoint, name):
    for copy in (name, "checkpoint-5"):
        shutil.copytree(checkpoint, tmp_path / copy)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def check_of_files(monkeypatch, first):
    """Does something, once, when the scan comes to a rank's files."""
    look, done = discovery._has_all_files, []

    def looking(path):
        if not done:
            done.append(path)
            first()
        return look(path)

    monkeypatch.setattr(discovery, "_has_all_files", looking)


def test_63_a_folder_that_is_rotated_during_the_scan_is_passed_over(copied, monkeypatch):
    newer = Path(shutil.copytree(copied, copied.parent / "checkpoint-12"))
    check_of_files(monkeypatch, lambda: shutil.rmtree(newer))
    assert trl_replay.last_complete_checkpoint(copied.parent) == str(copied)


def test_63_a_checkpoint_that_is_finished_during_the_scan_counts(copied, monkeypatch):
    """The newer one gets its last file while the scan looks at the older one, which is rotated then."""
    newer = Path(shutil.copytree(copied, copied.parent / "checkpoint-12"))
    state = newer / "trainer_state.json"
    state.rename(newer / "to come")

    def finish():
        (newer / "to come").rename(state)
        shutil.rmtree(copied)

    check_of_files(monkeypatch, finish)
    assert trl_replay.last_complete_checkpoint(copied.parent) == str(newer)


@pytest.mark.parametrize("content", ["[" * 200_000, "[" * 200_000 + "]" * 200_000], ids=["cut", "whole"])
def test_63_json_that_is_nested_too_deeply_to_be_read_is_not_whole(copied, content):
    (copied / "trainer_state.json").write_text(content)
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


def test_63_and_75_a_checkpoint_without_its_ranks_files_is_not_whole(copied):
    shutil.rmtree(copied / "trl_replay" / "rank-00000")
    assert trl_replay.last_complete_checkpoint(copied.parent) is None
    os.rmdir(copied / "trl_replay")  # as while it is being deleted; named by hand, it resumes with an empty buffer
    assert trl_replay.last_complete_checkpoint(copied.parent) is None


def test_63_what_another_run_left_in_a_checkpoint_does_not_count(tmp_path):
    train(tmp_path, max_steps=6)
    build(tmp_path, max_steps=6, seed=7).train()
    ours = tmp_path / "checkpoint-6" / "trl_replay" / "rank-00000"
    (ours / "table.safetensors").unlink()
    (ours / "payload-00000.safetensors").write_bytes(b"half")
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
