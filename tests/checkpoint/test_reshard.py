"""Resumed with other rows a process."""

from pathlib import Path

import pytest
from resuming import last, restored, resume, train
from support import Rewards

import trl_replay
from trl_replay.buffer.replay_buffer import ReplayBuffer
from trl_replay.testing import make_trainer


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_other_batch_sizes_lose_no_group_those_of_the_last_batch_included(tmp_path, scope):
    train(tmp_path, max_steps=6, replay_scope=scope, replay_buffer_size=50)
    saved = restored(tmp_path, last(tmp_path), replay_scope=scope, replay_buffer_size=50)
    assert max(saved["columns"]["update"]) == 5, "of the last batch"
    found = restored(
        tmp_path, last(tmp_path), replay_scope=scope, replay_buffer_size=50, per_device_train_batch_size=4
    )
    assert set(saved["payload"].values()) == set(found["payload"].values())
    session = resume(tmp_path, Path(last(tmp_path)), replay_scope=scope, per_device_train_batch_size=4)
    assert session.update == 8


def test_118_a_failed_row_of_a_candidate_is_stored_masked_after_resuming(tmp_path):
    failing = [1.0, None, 0.0, 0.0]
    first = make_trainer(tmp_path / "a", Rewards([failing] * 3), max_steps=2, save_strategy="steps", save_steps=1)
    trl_replay.attach(first, replay_start=None)
    first.train()
    trainer = make_trainer(tmp_path / "b", Rewards([[0.0] * 4] * 3), max_steps=2)
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert session.buffer.table.row_masked.tolist() == [[False, True, False, False]] * 3


@pytest.mark.parametrize("rows", [12, 4], ids=["the same rows", "other rows"])
def test_a_smaller_buffer_never_holds_more_than_it_keeps(tmp_path, rows, monkeypatch):
    train(tmp_path, max_steps=6, replay_buffer_size=50)
    receive, received = ReplayBuffer.receive, []

    def counted(buffer, groups, **how):
        received.extend(groups)
        receive(buffer, groups, **how)

    monkeypatch.setattr(ReplayBuffer, "receive", counted)
    checkpoint = str(tmp_path / "checkpoint-6")
    found = restored(tmp_path, checkpoint, replay_buffer_size=2, per_device_train_batch_size=rows)
    assert len(found["payload"]) == 2
    assert set(map(int, found["payload"])) <= set(received)
    assert len(received) <= (2 if rows == 12 else 2 + 3)
