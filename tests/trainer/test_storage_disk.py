"""Payload on disk, through the real trainer."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from resuming import LAYOUTS, differences, disk, everything, files, train
from support import DEAD, HALF, LIVE, Rewards, record

import trl_replay
from trl_replay import ConfigurationError, ReplayError
from trl_replay.testing import make_trainer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_payload_on_disk_is_training_with_payload_in_memory(tmp_path: Path, layout: str) -> None:
    memory = everything(*train(tmp_path / "memory", **LAYOUTS[layout]))
    trainer, session = train(tmp_path / "disk", **LAYOUTS[layout], **disk(tmp_path / "payload"))
    on_disk = everything(trainer, session)
    assert memory["totals"][1]["replaced"] > 0
    del memory["totals"][1]["bytes"], on_disk["totals"][1]["bytes"]
    del memory["metrics"]["replay/bytes"], on_disk["metrics"]["replay/bytes"]
    assert not differences(memory, on_disk)
    assert len(files(tmp_path / "payload")) == len(session.buffer), "what left the buffer left the disk"
    resumed = train(
        tmp_path / "disk",
        resume=str(tmp_path / "disk" / "checkpoint-6"),
        **LAYOUTS[layout],
        **disk(tmp_path / "other"),
    )
    assert differences(on_disk, everything(*resumed)) in ([], ["totals", "metrics"])


def test_the_folder_is_needed_and_a_bad_bound_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]))
    with pytest.raises(ConfigurationError, match="disk: name a folder on a disk with room"):
        trl_replay.attach(trainer, replay_storage="disk")
    with pytest.raises(ConfigurationError, match="disk: max_bytes='lots' can't be used"):
        trl_replay.attach(trainer, **disk(tmp_path, max_bytes="lots"))


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk takes two groups; later ones find room only when a stored one leaves."""
    from trl_replay.serialization import group_files

    write = group_files.write

    def full(path: Path, groups: Any) -> None:
        if len(files(tmp_path / "payload")) >= 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, groups)

    monkeypatch.setattr(group_files, "write", full)
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=5)
    session = trl_replay.attach(trainer, **disk(tmp_path / "payload"))
    steps = record(session)
    with pytest.warns(
        UserWarning, match=r"no room for further groups \(training goes on without.* is full: .*No space"
    ):
        trainer.train()
    assert len(steps) == 5
    assert len(files(tmp_path / "payload")) == 2
    assert len(session.buffer) - len(session.buffer.overflow) == 2
    assert session.totals.counters["replaced"] == 4, "groups without a place are still replayed once they are there"
    assert "the storage had no room for it" in session.explain()
    assert not list((tmp_path / "payload").rglob("*half*"))


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_a_bounded_folder_never_grows_beyond_its_bound(tmp_path: Path, scope: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    session = trl_replay.attach(trainer, replay_scope=scope, **disk(tmp_path / "payload", max_bytes="3KB"))
    with pytest.warns(UserWarning, match="no room for further groups"):
        trainer.train()
    assert sum(path.stat().st_size for path in files(tmp_path / "payload")) == session.buffer.storage.nbytes <= 3000
    assert session.totals.counters["replaced"] > 0


def test_56_a_storage_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]), max_steps=4)
    session = trl_replay.attach(
        trainer, replay_storage="disk", replay_storage_kwargs={"folder": str(tmp_path / "payload")}, replay_start=0
    )
    trainer.args.max_steps = 1
    trainer.train()
    for folder in (tmp_path / "payload").glob("trl_replay-*/0"):
        shutil.rmtree(folder)
    trainer.args.max_steps = 4
    with pytest.raises(ReplayError, match="is gone: something else has deleted"):
        trainer.train()
    session.buffer.clear()
    assert session.buffer.nbytes == 0
