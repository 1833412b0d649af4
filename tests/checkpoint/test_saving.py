"""Saving and loading around the trainer's own: in which order, and what happens when one of them fails."""

import errno
import importlib
import shutil
from pathlib import Path

import pytest
import torch
from resuming import build, differences, everything, last, resume, state, train
from support import DEAD, HALF, LIVE, Act, Rewards

import trl_replay
from trl_replay import CheckpointError, hookimpl
from trl_replay.errors import HookError, MismatchError
from trl_replay.testing import make_trainer


def test_the_buffer_is_rotated_with_the_checkpoint(tmp_path):
    train(tmp_path, max_steps=6, save_steps=2, save_total_limit=2)
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert folders == ["checkpoint-4", "checkpoint-6"]
    assert {path.name for path in (tmp_path / "checkpoint-6" / "trl_replay" / "rank-00000").iterdir()} == {
        "state.json",
        "table.safetensors",
        "payload-00000.safetensors",
    }


def test_ours_is_written_before_stocks_and_a_checkpoint_written_again_is_not_whole_meanwhile(tmp_path, monkeypatch):
    train(tmp_path, max_steps=6)
    seen = []
    trainer = build(tmp_path, max_steps=6)
    write = type(trainer)._save_checkpoint

    def late(self, model, trial):
        folder = tmp_path / "checkpoint-6"
        seen.append(((folder / "trainer_state.json").exists(), (folder / "trl_replay").exists()))
        assert trl_replay.last_complete_checkpoint(tmp_path) is None
        write(self, model, trial)

    monkeypatch.setattr(type(trainer), "_save_checkpoint", late)
    train(tmp_path, trainer=trainer)
    assert seen == [(False, True)]
    assert last(tmp_path).endswith("checkpoint-6")


def test_a_hook_that_fails_while_saving_is_named(tmp_path, plug):
    class Plugin:
        @hookimpl
        def trl_replay_save(self, session, directory):
            raise OSError("no room")

    with pytest.raises(HookError, match=r"unlucky.*failed in trl_replay_save.*no room"):
        train(tmp_path, replay_plugins=plug(Plugin(), "unlucky"), max_steps=6)
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


def test_with_replay_off_a_checkpoint_with_a_buffer_is_stocks(tmp_path, checkpoint):
    trainer = build(tmp_path, max_steps=8)
    session = trl_replay.attach(trainer, use_replay=False)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not session.enabled
    assert torch.isfinite(next(trainer.model.parameters())).all()


def test_a_disk_that_is_full_while_saving_stops_in_words_and_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    from trl_replay.checkpoint import format as saved

    write, calls = saved.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(
        CheckpointError,
        match=r"can't be written to .*checkpoint-12: .*No space left on device.*give another output_dir",
    ):
        train(tmp_path)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    monkeypatch.undo()
    resumed = everything(*train(tmp_path, resume=str(tmp_path / "checkpoint-6")))
    whole = everything(*train(tmp_path / "whole"))
    assert not differences(whole, resumed)


def test_a_folder_that_is_a_link_is_read_and_written_there(copied, tmp_path):
    """A link goes when the checkpoint is written again; what it led to stays."""
    ours = copied / "trl_replay"
    ours.rename(tmp_path / "away")
    ours.symlink_to(tmp_path / "away")
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(copied)
    assert resume(tmp_path, copied).update == 8
    train(tmp_path, max_steps=6)
    assert not ours.is_symlink()
    assert (tmp_path / "away" / "rank-00000" / "state.json").exists()
    assert resume(tmp_path, copied).update == 8


def test_a_folder_that_cannot_be_cleared_stops_the_saving(copied, tmp_path, monkeypatch):
    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        train(tmp_path, max_steps=6)


@pytest.mark.parametrize("logging", [{}, {"logging_strategy": "no"}], ids=str)
def test_61_a_buffer_of_another_run_is_not_taken_for_its_own(tmp_path, logging):
    """The same output folder: stock's files are the second run's, and ours are still those of the first. Before
    anything was logged, the trainer's states of both say the same."""
    train(tmp_path, max_steps=6, **logging)
    build(tmp_path, max_steps=6, seed=7, **logging).train()
    folder = tmp_path / "checkpoint-6"
    with pytest.raises(MismatchError, match=r"checkpoint-6.trl_replay does not belong to the rest of the checkpoint"):
        resume(tmp_path, folder, seed=7, **logging)


def test_61_a_run_that_goes_on_without_replay_leaves_the_buffer_behind(tmp_path):
    """Resumed from the sixth update without replay, it writes over the twelfth; resumed from there, replay starts
    empty, and its next checkpoints are its own again."""
    train(tmp_path, logging_strategy="no")
    build(tmp_path, logging_strategy="no").train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    with pytest.raises(MismatchError, match=r"checkpoint-12.trl_replay does not belong"):
        resume(tmp_path, tmp_path / "checkpoint-12", max_steps=14)
    shutil.rmtree(tmp_path / "checkpoint-12" / "trl_replay")
    with pytest.warns(UserWarning, match="holds no replay buffer"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-12"), max_steps=18)
    assert resume(tmp_path, tmp_path / "checkpoint-18", max_steps=20).totals.batches == 8


def test_candidates_never_settle_in_detach(tmp_path):
    """Training is interrupted with candidates that have all their log-probs."""

    def interrupt():
        raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]))
    trainer.add_callback(Act({2: interrupt}))
    session = trl_replay.attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    waiting = session.step.carry.pending.candidates
    assert [candidate.complete() for candidate in waiting] == [True, True]
    before = state(session)
    trl_replay.detach(trainer)
    assert not differences(before, state(session))
    assert len(session.buffer) == 2


def test_a_run_that_is_killed_at_random_moments_ends_as_the_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    kills = importlib.import_module("kills")
    outcome = kills.run(tmp_path, kills=4, seed=1, kind=kills.Run(updates=30, processes=1, scope="process"))
    assert outcome["kills"] >= 4
    assert outcome["identical"]
