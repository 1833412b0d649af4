"""Resumed with other rows a process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from resuming import last, restored, resume, train
from safetensors.torch import load_file
from support import Rewards

import trl_replay
from trl_replay.buffer.replay_buffer import ReplayBuffer
from trl_replay.checkpoint import format as saved
from trl_replay.checkpoint.format import TargetRank, reshard
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
    settings = {"replay_evictor": "heap", "per_device_train_batch_size": rows}
    scores = restored(tmp_path, checkpoint, replay_buffer_size=50, **settings)["columns"]["score"]
    received.clear()
    found = restored(tmp_path, checkpoint, replay_buffer_size=2, **settings)
    assert sorted(found["columns"]["score"]) == sorted(scores)[-2:], "what its evictor ranks highest"
    assert len(found["payload"]) == 2
    assert set(map(int, found["payload"])) <= set(received)
    assert len(received) <= (2 if rows == 12 else 2 + 3)


def written(folder, state, groups, ranks):
    """One buffer of that many ranks, each of which has every entry of its number and the table of all."""
    count = 40 * ranks
    numbers = np.arange(count) % len(groups)
    columns = {name: column[numbers] for name, column in state.columns.items()}
    columns |= {"serial": np.arange(count), "owner": np.arange(count) % ranks}
    identity = replace(state.identity, scope="gathered", processes=ranks)
    tables = [saved.hash_of_table(columns)] * ranks
    for rank in range(ranks):
        saved.rank_folder(folder, rank).mkdir(parents=True)
    for rank in range(ranks):
        payload = [(serial, groups[numbers[serial]]) for serial in range(rank, count, ranks)]
        one = replace(state, identity=identity, rank=rank, columns=columns, files={})
        saved.write(folder, one, tables, payload, lambda folder: None)
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_shared_buffer_is_written_once_and_of_it_each_new_rank_reads_its_own_entries_and_one_table(
    copied, tmp_path, monkeypatch
):
    state = saved.read(copied / "trl_replay", 0)
    groups = [packed for _, packed in state.payload()]
    files = written(tmp_path / "four", state, groups, 4)
    assert sum(path.name == "table.safetensors" for path in files) == 1
    told = sum(len(load_file(path)["groups"]) for path in files if "payload" in path.name)
    tables = {}
    states = [saved.read(tmp_path / "four", rank, tables) for rank in range(4)]
    assert len(tables) == 1, "read once"
    read, of_file = [], saved.from_tensors

    def counted(*given):
        for serial, packed in of_file(*given):
            read.append(len(packed.data))
            yield serial, packed

    monkeypatch.setattr(saved, "from_tensors", counted)
    for target in range(2):
        share = reshard(states, TargetRank(True, target, 2))
        own = set(share.columns["serial"][share.columns["owner"] == target].tolist())
        assert dict(share.payload({*range(160)})).keys() == own
        assert len(own) == 80
    assert sum(read) == told, "no group is read twice"
