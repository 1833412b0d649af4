"""Checkpoints in hostile surroundings: full disks, half-written and moved folders, odd plugins, other settings."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resuming import build, differences, everything, restored, state, train
from support import DEAD, HALF, LIVE, Rewards
from test_memory import disk, files

import trl_replay
from trl_replay import CheckpointError, MismatchError
from trl_replay.strategies.scopes import ProcessScope
from trl_replay.strategies.storages import CpuStorage
from trl_replay.testing import make_trainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    """A checkpoint of six updates. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, max_steps=6)
    return folder / "checkpoint-6"


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-6"))


def resume(folder: Path, checkpoint: Path, **settings: Any) -> Any:
    return train(folder, resume=str(checkpoint), **{"max_steps": 8, "save_strategy": "no", **settings})[1]


# the newest whole checkpoint


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


def test_ours_is_there_when_the_trainer_uploads(tmp_path: Path, monkeypatch: Any) -> None:
    uploaded = []
    trainer = build(tmp_path, max_steps=6)
    trainer.args.push_to_hub = True

    def push(self: Any, folder: str) -> None:
        uploaded.extend(path.name for path in (Path(folder) / "trl_replay" / "rank-00000").iterdir())

    monkeypatch.setattr(type(trainer), "_push_from_checkpoint", push)
    monkeypatch.setattr(type(trainer), "push_to_hub", lambda *args, **kwargs: None)
    train(tmp_path, trainer=trainer)
    assert set(uploaded) == {"state.json", "table.safetensors", "candidates.safetensors", "payload-00000.safetensors"}


# writing


def test_a_disk_that_is_full_while_saving_stops_in_words_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from trl_replay.serialization import group_files

    write, calls = group_files.write, []

    def full(path: Path, groups: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, groups)

    monkeypatch.setattr(group_files, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(tmp_path)
    assert trl_replay.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    monkeypatch.undo()
    resumed = everything(*train(tmp_path, resume=str(tmp_path / "checkpoint-6")))
    whole = everything(*train(tmp_path / "whole"))
    assert not differences(whole, resumed)


def test_a_folder_that_is_a_link_is_read_and_written_there(copied: Path, tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_cleared_stops_the_saving(copied: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        train(tmp_path, max_steps=6)


class Keeping:
    """A sampler with a state of any kind."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.loaded: Any = None

    def __call__(self, table: Any, count: int, context: Any) -> Any:
        return np.arange(len(table))[:count]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["kept"]


@pytest.mark.parametrize(
    ("kept", "loaded"),
    [
        (np.float32(0.5), 0.5),
        ((1, 2.5), [1, 2.5]),
        ({"a": [np.int64(3), None, True, "ü"]}, {"a": [3, None, True, "ü"]}),
        (float("inf"), float("inf")),
    ],
)
def test_what_json_can_hold_of_a_strategys_state_comes_back(tmp_path: Path, kept: Any, loaded: Any) -> None:
    train(tmp_path, max_steps=6, replay_sampler=Keeping(kept))
    sampler = Keeping(None)
    resume(tmp_path, tmp_path / "checkpoint-6", replay_sampler=sampler)
    assert sampler.loaded == loaded


@pytest.mark.parametrize(
    ("kept", "words"), [({2: 1, 10: 2}, "the key 2"), (np.zeros(2), r"array\(\[0., 0.\]\)"), ({1}, r"\{1\}")]
)
def test_what_json_cannot_bring_back_is_refused_when_it_is_saved(tmp_path: Path, kept: Any, words: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"The sampler's state_dict.* gives {words}, which JSON can't bring back"
    ):
        train(tmp_path, max_steps=6, replay_sampler=Keeping(kept))


# resuming


def test_resuming_from_the_end_settles_what_was_pending_and_ends(tmp_path: Path) -> None:
    """Stock does one update more."""
    _, whole = train(tmp_path, max_steps=6, replay_buffer_size=50)
    trainer, session = train(tmp_path, max_steps=6, resume=str(tmp_path / "checkpoint-6"), replay_buffer_size=50)
    assert session.update == trainer.state.global_step
    assert session.carry.pending_groups is None
    assert set(session.buffer.table.serial.tolist()) >= set(whole.buffer.table.serial.tolist())


def test_resuming_again_and_again_from_one_checkpoint_is_always_the_same(tmp_path: Path) -> None:
    trainer, session = train(tmp_path)
    whole, folder = everything(trainer, session), tmp_path / "checkpoint-6"
    for _ in range(2):
        trainer._step, trainer._buffered_inputs = 0, None  # TRL's own, which stock does not reset either
        trainer.train(resume_from_checkpoint=str(folder))
        assert not differences(whole, everything(trainer, session))


def test_a_buffer_that_a_run_without_replay_wrote_its_checkpoint_around_is_not_taken_for_its_own(
    tmp_path: Path,
) -> None:
    """The same output folder: stock's files are the second run's, and ours are still those of the first."""
    train(tmp_path, max_steps=6)
    build(tmp_path, max_steps=6, seed=7).train()
    folder = tmp_path / "checkpoint-6"
    assert (folder / "trl_replay").is_dir()
    with pytest.raises(MismatchError, match=r"checkpoint-6.trl_replay does not belong to the rest of the checkpoint"):
        resume(tmp_path, folder)
    with pytest.warns(UserWarning, match="an empty replay buffer.*does not belong"):
        assert resume(tmp_path, folder, replay_on_mismatch="empty").totals.batches == 2
    shutil.rmtree(folder / "trl_replay")
    with pytest.warns(UserWarning, match="holds no replay buffer"):
        assert resume(tmp_path, folder).totals.batches == 2


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_a_checkpoint_in_the_middle_of_an_update_loses_nothing(tmp_path: Path, scope: str) -> None:
    """As on SIGTERM (`enable_jit_checkpoint`): gradients are there, the optimizer has not moved."""
    from transformers import TrainerCallback

    saved = []

    class Save(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                saved.append(take())
                trainer._save_checkpoint(trainer.model, trial=None)
                raise KeyboardInterrupt

    def take() -> dict[str, Any]:
        return state(session)

    trainer = build(tmp_path, save_strategy="no")
    trainer.add_callback(Save())
    session = trl_replay.attach(trainer, replay_scope=scope, replay_buffer_size=50)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    folder = trl_replay.last_complete_checkpoint(tmp_path)
    assert folder == str(tmp_path / "checkpoint-3")
    assert saved[0]["candidates"]
    assert not differences(saved[0], restored(tmp_path, folder, replay_scope=scope, replay_buffer_size=50))
    _, resumed = train(tmp_path, resume=folder, max_steps=8, replay_scope=scope, replay_buffer_size=50)
    assert resumed.update == 8
    kept = set(resumed.buffer.table.serial.tolist())
    assert kept >= {*saved[0]["columns"]["serial"], *(candidate[0] for candidate in saved[0]["candidates"])}


def test_a_checkpoint_that_was_moved_is_read_where_it_is(checkpoint: Path, tmp_path: Path) -> None:
    there = shutil.copytree(checkpoint, tmp_path / "a" / "b")
    assert not differences(restored(tmp_path, str(checkpoint)), restored(tmp_path, str(there)))


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_in_a_second_shuffled_epoch_everything_comes_back_and_training_goes_on_as_stocks(
    tmp_path: Path, scope: str
) -> None:
    """Nine prompts are three updates; stock shuffles a second epoch anew when it resumes."""
    from datasets import Dataset

    def shuffled(updates: int) -> Any:
        made = build(tmp_path, max_steps=updates, save_steps=5, shuffle_dataset=True)
        made.train_dataset = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(9)])
        return made

    trainer, saved = shuffled(5), []
    session = trl_replay.attach(trainer, replay_scope=scope, replay_buffer_size=5)
    write = trainer._save_checkpoint
    trainer.__dict__["_save_checkpoint"] = lambda *args, **kwargs: (
        saved.append(state(session)),
        write(*args, **kwargs),
    )
    trainer.train()
    del trainer.__dict__["_save_checkpoint"]
    folder = str(tmp_path / "checkpoint-5")
    assert saved[0]["candidates"]
    assert not differences(saved[0], restored(tmp_path, folder, trainer=shuffled(9), replay_scope=scope))
    _, resumed = train(tmp_path, trainer=shuffled(9), resume=folder, replay_scope=scope)
    assert (resumed.update, resumed.totals.batches) == (9, saved[0]["totals"][0] + 4)


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_an_empty_buffer_makes_the_round_trip(tmp_path: Path, scope: str) -> None:
    def zero(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, zero, max_steps=2, save_strategy="steps", save_steps=2)
    train(tmp_path, trainer=trainer, replay_scope=scope)
    again = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    _, session = train(tmp_path, trainer=again, resume=str(tmp_path / "checkpoint-2"), replay_scope=scope)
    assert session.totals.batches == 4
    assert len(session.buffer) == 4


@pytest.mark.parametrize(("then", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_groups_of_another_precision_are_replayed_as_they_were_saved(tmp_path: Path, then: str, now: str) -> None:
    train(tmp_path, max_steps=6, replay_logps_dtype=then)
    session = resume(tmp_path, tmp_path / "checkpoint-6", max_steps=10, replay_logps_dtype=now, replay_evictor="heap")
    held = {str(session.buffer.load(s).tensors["old_per_token_logps"].dtype) for s in session.buffer.held()}
    assert held == {"torch.float32", "torch.bfloat16"}
    assert session.totals.counters["replaced"] > 0


def test_a_scope_that_is_not_ours_resumes_with_the_same_rows_only(tmp_path: Path) -> None:
    from accelerate import Accelerator

    def own(**settings: Any) -> dict[str, Any]:
        scope = ProcessScope(Accelerator(cpu=True))
        verbs = {name: getattr(scope, name) for name in ("share", "agree", "admit", "fetch")}
        return {"replay_scope": type("Own", (), {"__init__": lambda self: self.__dict__.update(verbs)})(), **settings}

    train(tmp_path, max_steps=6, **own())
    assert resume(tmp_path, tmp_path / "checkpoint-6", **own()).update == 8
    with pytest.raises(MismatchError, match=r"1 processes of 12 rows each wrote it and 1 of 4 read it.*='Own'"):
        resume(tmp_path, tmp_path / "checkpoint-6", **own(per_device_train_batch_size=4))


class Counting(CpuStorage):
    """Counts what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.serials: list[int] = []

    def put(self, serial: int, group: Any) -> None:
        self.serials.append(serial)
        super().put(serial, group)


@pytest.mark.parametrize("rows", [12, 4], ids=["the same rows", "other rows"])
def test_a_smaller_buffer_never_holds_more_than_it_keeps(tmp_path: Path, rows: int) -> None:
    train(tmp_path, max_steps=6, replay_buffer_size=50)
    storage = Counting()
    found = restored(
        tmp_path, str(tmp_path / "checkpoint-6"), replay_buffer_size=2, replay_storage=storage,
        per_device_train_batch_size=rows,
    )  # fmt: skip
    assert len(found["payload"]) == 2
    assert set(map(int, found["payload"])) <= set(storage.serials)
    assert len(storage.serials) <= (2 if rows == 12 else 2 + 3)


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_a_disk_with_less_room_than_the_checkpoint_takes_what_fits_and_keeps_the_rest_nowhere(
    tmp_path: Path, scope: str
) -> None:
    train(tmp_path, max_steps=6, replay_scope=scope, replay_buffer_size=50, **disk(tmp_path / "large"))
    trainer = build(tmp_path, max_steps=8, save_strategy="no")
    session = trl_replay.attach(
        trainer, replay_scope=scope, replay_buffer_size=50, **disk(tmp_path / "small", max_bytes="3KB")
    )
    loaded, callback = [], trainer.callback_handler.callbacks[-1]
    begin = callback.on_train_begin

    def watched(*args: Any, **kwargs: Any) -> Any:
        loaded.append(state(session))
        return begin(*args, **kwargs)

    callback.on_train_begin = watched
    with pytest.warns(UserWarning, match="no room for further groups"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert 0 < len(loaded[0]["payload"]) < 6
    assert len(loaded[0]["payload"]) == len(loaded[0]["columns"]["serial"]), "the rest left the table at once"
    assert "the storage had no room for it" in session.explain()
    assert sum(path.stat().st_size for path in files(tmp_path / "small")) <= 3000
    assert session.update == 8


# candidates


def test_candidates_never_settle_in_detach(tmp_path: Path) -> None:
    """Training is interrupted with candidates that have all their log-probs."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]))
    trainer.add_callback(Interrupt())
    session = trl_replay.attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    waiting = session.carry.pending_groups.candidates
    assert [candidate.complete() for candidate in waiting] == [True, True]
    before = state(session)
    trl_replay.detach(trainer)
    assert not differences(before, state(session))
    assert len(session.buffer) == 2


# files in the place of files


@pytest.mark.parametrize("name", ["state.json", "table.safetensors", "candidates.safetensors",
                                  "payload-00000.safetensors"])  # fmt: skip
@pytest.mark.parametrize(
    "kind", ["empty", "a folder", "a link to nowhere", "a link to itself", "another checkpoint's"]
)
def test_what_stands_in_a_files_place_is_an_error_that_names_it(
    copied: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = copied / "trl_replay" / "rank-00000" / name
    data = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "a folder":
        path.mkdir()
    elif kind == "another checkpoint's":
        path.write_bytes(another(data))
    else:
        path.symlink_to(tmp_path / "nowhere" if kind == "a link to nowhere" else path)
    with pytest.raises(CheckpointError, match="rank-00000"):
        resume(tmp_path, copied)


def another(data: bytes) -> bytes:
    """The file of a run that went on a little: whole in itself."""
    if data.startswith(b"{"):
        told = json.loads(data)
        told["content"]["session"]["update"] += 1
        return json.dumps(told).encode()
    return data[:-1] + bytes([data[-1] ^ 1])
