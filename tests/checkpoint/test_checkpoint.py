"""Checkpoints: resuming is bit-identical to the run that never stopped, wherever stock's own resume is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import LAYOUTS, PAIRS, build, differences, everything, restored, state, train
from safetensors.numpy import load_file
from support import DEAD, LIVE, Rewards

import trl_replay
from trl_replay import CheckpointError, MismatchError, hookimpl
from trl_replay.testing import make_model, make_tokenizer, make_trainer


def last(folder: Path) -> str:
    found = trl_replay.last_complete_checkpoint(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(("evictor", "sampler", "scope", "layout"), PAIRS)
def test_22_resuming_is_bit_identical_to_the_run_that_never_stopped(
    tmp_path: Path, evictor: str, sampler: str, scope: str, layout: str
) -> None:
    settings = {"replay_evictor": evictor, "replay_sampler": sampler, "replay_scope": scope, **LAYOUTS[layout]}
    whole = everything(*train(tmp_path, **settings))
    assert whole["totals"][1]["replaced"] > 0, "something was replayed"
    resumed = everything(*train(tmp_path, resume=str(tmp_path / "checkpoint-6"), **settings))
    assert not differences(whole, resumed)


LIMITS: dict[str, Any] = {
    "replay_refresh": "ratio",
    "replay_max_log_ratio": 0.5,
    "replay_min_ess": 1.0,
    "replay_samples_per_insert": 2.0,
    "replay_start_pass_rate": 0.01,
    "replay_retire_passes": 4,
    "replay_unfilled": "exclude",
    "replay_correction": "per",
    "learning_rate": 1e-2,
}


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
@pytest.mark.parametrize("layout", ["one iteration", "two iterations"])
def test_limits_and_gates_go_on_where_they_were(tmp_path: Path, scope: str, layout: str) -> None:
    settings = {**LIMITS, "replay_scope": scope, **LAYOUTS[layout]}
    trainer, session = train(tmp_path, **settings)
    whole = everything(trainer, session)
    assert session.components.rate_limiter.fraction < 1.0, "the floor was reached"
    assert whole["totals"][1]["replaced"] > 0
    trainer, session = train(tmp_path, resume=str(tmp_path / "checkpoint-6"), **settings)
    assert not differences(whole, everything(trainer, session))


@pytest.mark.parametrize("storage", ["cpu", "device"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_it_is_so_in_a_later_epoch_without_shuffling_and_in_the_first_with_it(
    tmp_path: Path, storage: str, shuffled: bool
) -> None:
    """Nine prompts are three updates: without shuffling the sixth update ends the second epoch."""

    def trainer(folder: Path, updates: int) -> Any:
        from datasets import Dataset

        made = build(folder, max_steps=updates, shuffle_dataset=shuffled)
        if not shuffled:
            made.train_dataset = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(9)])
        return made

    whole = everything(*train(tmp_path, trainer=trainer(tmp_path / "whole", 12), replay_storage=storage))
    train(tmp_path, trainer=trainer(tmp_path / "cut", 6), replay_storage=storage)
    again = trainer(tmp_path / "cut", 12)
    resumed = everything(*train(tmp_path, resume=last(tmp_path / "cut"), trainer=again, replay_storage=storage))
    assert not differences(whole, resumed)


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
@pytest.mark.parametrize(
    "layout",
    [
        {"num_iterations": 2},
        {"per_device_train_batch_size": 6, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    ],
)
def test_in_the_middle_of_a_cycle_everything_comes_back_as_it_was_saved(
    tmp_path: Path, scope: str, layout: dict[str, Any]
) -> None:
    """Rewards of three prompts; the fifth update is the first of two on its generation batch."""
    saved = {}

    def watched(trainer: Any) -> None:
        write = trainer._save_checkpoint

        def save(*args: Any, **kwargs: Any) -> Any:
            saved.update(state(write.session))
            write(*args, **kwargs)
            assert not differences(saved, state(write.session)), "saving changed the session"

        trainer.__dict__["_save_checkpoint"] = save

    trainer = build(tmp_path, max_steps=5, save_steps=5, **layout)
    session = trl_replay.attach(trainer, replay_buffer_size=5, replay_scope=scope)
    watched(trainer)
    trainer.train()
    assert saved["candidates"], "candidates were pending"
    found = restored(tmp_path, last(tmp_path), replay_scope=scope, **layout)
    assert not differences(saved, found)
    _, session = train(tmp_path, resume=last(tmp_path), max_steps=9, save_steps=20, replay_scope=scope, **layout)
    assert session.update == 9
    assert session.totals.batches > saved["totals"][0]


def test_saving_settles_nothing_and_candidates_settle_at_the_next_scoring(tmp_path: Path) -> None:
    script = [LIVE, LIVE, DEAD], [LIVE, LIVE, DEAD], [DEAD, DEAD, DEAD]
    trainer = make_trainer(tmp_path, Rewards(*script), max_steps=2, save_strategy="steps", save_steps=2)
    session = trl_replay.attach(trainer)
    trainer.train()
    assert len(session.buffer) == 4, "the end of training settled the last two"
    rewards = Rewards(*script)
    rewards.calls = 2
    again = make_trainer(tmp_path, rewards, max_steps=3)
    session = trl_replay.attach(again, replay_sampler="newest")
    again.train(resume_from_checkpoint=last(tmp_path))
    assert session.buffer.table.serial.tolist() == [0, 1, 2, 3], "two were saved as candidates"
    assert session.metrics["replay/stored"] == 2
    assert session.buffer.table.uses.tolist() == [0, 2, 1, 1], "and are replayed in the batch that settled them"


def test_the_same_trainer_can_go_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    trainer, session = train(tmp_path)
    whole = everything(trainer, session)
    trl_replay.detach(trainer)
    trainer._step, trainer._buffered_inputs = 0, None  # TRL's own, which stock does not reset either
    resumed = everything(*train(tmp_path, trainer=trainer, resume=str(tmp_path / "checkpoint-6")))
    assert not differences(whole, resumed)


def test_the_buffer_is_rotated_with_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, max_steps=6, save_steps=2, save_total_limit=2)
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert folders == ["checkpoint-4", "checkpoint-6"]
    assert {path.name for path in (tmp_path / "checkpoint-6" / "trl_replay" / "rank-00000").iterdir()} == {
        "state.json",
        "table.safetensors",
        "candidates.safetensors",
        "payload-00000.safetensors",
    }


def test_ours_is_written_before_stocks_and_a_checkpoint_written_again_is_not_whole_meanwhile(
    tmp_path: Path, monkeypatch: Any
) -> None:
    train(tmp_path, max_steps=6)
    seen = []
    trainer = build(tmp_path, max_steps=6)
    write = type(trainer)._save_checkpoint

    def late(self: Any, model: Any, trial: Any) -> None:
        folder = tmp_path / "checkpoint-6"
        seen.append(((folder / "trainer_state.json").exists(), (folder / "trl_replay").exists()))
        assert trl_replay.last_complete_checkpoint(tmp_path) is None
        write(self, model, trial)

    monkeypatch.setattr(type(trainer), "_save_checkpoint", late)
    train(tmp_path, trainer=trainer)
    assert seen == [(False, True)]
    assert last(tmp_path).endswith("checkpoint-6")


# what a strategy and a plugin keep


class Counting:
    """A sampler with running statistics."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, table: Any, count: int, context: Any) -> Any:
        self.calls += 1
        return np.arange(len(table))[:: -1 if self.calls % 2 else 1][:count]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_strategys_running_state_and_a_plugins_columns_and_files_come_back(tmp_path: Path) -> None:
    class Plugin:
        def __init__(self) -> None:
            self.batches = 0
            self.folders: list[Path] = []

        @hookimpl
        def trl_replay_attached(self, session: Any) -> None:
            session.buffer.table.add_column("seen", fill=-1.0)

        @hookimpl
        def trl_replay_metrics(self, context: Any) -> None:
            self.batches += 1
            context.table.seen[:] = self.batches

        @hookimpl
        def trl_replay_save(self, session: Any, directory: Path) -> None:
            (directory / "batches.json").write_text(json.dumps(self.batches))

        @hookimpl
        def trl_replay_load(self, session: Any, directory: Path) -> None:
            self.batches = json.loads((directory / "batches.json").read_text())
            self.folders.append(directory)

    def run(folder: Path, **settings: Any) -> tuple[dict[str, Any], Any, Any]:
        plugin, sampler = Plugin(), Counting()
        trl_replay.register(plugin, "one/two")
        try:
            found = train(folder, replay_plugins="one/two", replay_sampler=sampler, **settings)
        finally:
            trl_replay.unregister("one/two")
        return everything(*found), plugin, sampler

    whole, plugin, sampler = run(tmp_path / "whole")
    run(tmp_path / "cut", max_steps=6)
    resumed, other, counting = run(tmp_path / "cut", resume=last(tmp_path / "cut"))
    assert not differences(whole, resumed)
    assert set(whole["columns"]["seen"]) != {-1.0}
    assert (other.batches, counting.calls) == (plugin.batches, sampler.calls)
    assert [folder.name for folder in other.folders] == ["one%2Ftwo"], "a folder of its own, whatever its name"


def test_a_hook_that_fails_while_saving_is_named(tmp_path: Path) -> None:
    class Plugin:
        @hookimpl
        def trl_replay_save(self, session: Any, directory: Path) -> None:
            raise OSError("no room")

    trl_replay.register(Plugin(), "unlucky")
    try:
        with pytest.raises(trl_replay.HookError, match=r"unlucky.*failed in trl_replay_save.*no room"):
            train(tmp_path, replay_plugins="unlucky", max_steps=6)
    finally:
        trl_replay.unregister("unlucky")
    assert trl_replay.last_complete_checkpoint(tmp_path) is None


# what does not fit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    """A checkpoint of six updates with a full buffer and candidates. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, max_steps=6)
    return Path(last(folder))


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-6"))


def resume(folder: Path, checkpoint: Path, **settings: Any) -> Any:
    return train(folder, resume=str(checkpoint), **{"max_steps": 8, "save_strategy": "no", **settings})[1]


def test_a_checkpoint_without_a_buffer_warns_and_starts_with_an_empty_one(tmp_path: Path, copied: Path) -> None:
    shutil.rmtree(copied / "trl_replay")
    with pytest.warns(UserWarning, match="checkpoint-6 holds no replay buffer: training resumes with an empty one"):
        session = resume(tmp_path, copied)
    assert session.update == 2


def larger_vocabulary(folder: Path) -> Any:
    tokenizer = make_tokenizer()
    return build(folder, model=make_model(tokenizer, vocab_size=len(tokenizer) + 8), max_steps=8)


def other_tokenizer(folder: Path) -> Any:
    trainer = build(folder, max_steps=8)
    trainer._tokenizer.add_tokens(["ü"])
    return trainer


def test_what_was_saved_under_other_settings_is_refused_with_both_values(tmp_path: Path, checkpoint: Path) -> None:
    refused = "does not fit this run: "
    with pytest.raises(MismatchError, match=rf"{refused}num_generations was 4 and is 6; replay_scope.* or set replay"):
        resume(tmp_path, checkpoint, num_generations=6, replay_scope="gathered")
    with pytest.raises(MismatchError, match=rf"{refused}replay_scope was 'process' and is 'sharded'\."):
        resume(tmp_path, checkpoint, replay_scope="sharded")
    with pytest.raises(MismatchError, match=rf"{refused}the tokenizer's fingerprint was '\w+' and is '\w+'\."):
        resume(tmp_path, checkpoint, trainer=other_tokenizer(tmp_path))
    with pytest.raises(MismatchError, match=rf"{refused}the model's vocabulary size was 44 and is 52\."):
        restored(tmp_path, str(without_model(checkpoint, tmp_path)), trainer=larger_vocabulary(tmp_path))


def without_model(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with a model of a larger vocabulary in it."""
    copy = Path(shutil.copytree(checkpoint, folder / "grown"))
    larger_vocabulary(folder).model.save_pretrained(copy)
    for path in ("optimizer.pt", "scheduler.pt"):
        (copy / path).unlink()
    return copy


def test_the_user_may_decide_to_go_on_with_an_empty_buffer(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.warns(UserWarning, match="an empty replay buffer.*num_generations was 4 and is 6"):
        session = resume(tmp_path, checkpoint, num_generations=6, replay_on_mismatch="empty")
    assert session.update == 2
    assert session.totals.batches == 2


def test_another_format_version_is_refused_with_both_values(tmp_path: Path, copied: Path) -> None:
    path = copied / "trl_replay" / "rank-00000" / "state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(MismatchError, match=r"has the format version 2; this release reads version 1"):
        resume(tmp_path, copied)


@pytest.mark.parametrize("name", ["state.json", "table.safetensors", "payload-00000.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, copied: Path, name: str) -> None:
    (copied / "trl_replay" / "rank-00000" / name).unlink()
    with pytest.raises(CheckpointError, match=f"rank-00000.*No such file.*{name}"):
        resume(tmp_path, copied)


def test_a_file_whose_checksum_differs_is_named(tmp_path: Path, copied: Path) -> None:
    path = copied / "trl_replay" / "rank-00000" / "payload-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"payload-00000.safetensors is not what was saved: its checksum"):
        resume(tmp_path, copied)
    with pytest.warns(UserWarning, match=r"an empty replay buffer.*checksum"):
        resume(tmp_path, copied, replay_on_mismatch="empty")


def test_a_smaller_buffer_keeps_what_its_evictor_ranks_highest(tmp_path: Path, checkpoint: Path) -> None:
    scores = sorted(load_file(checkpoint / "trl_replay" / "rank-00000" / "table.safetensors")["score"])
    found = restored(tmp_path, str(checkpoint), replay_buffer_size=2, replay_evictor="heap")
    assert sorted(found["columns"]["score"]) == scores[-2:]
    assert len(found["payload"]) == 2


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_other_batch_sizes_settle_whole_candidates_at_once(tmp_path: Path, scope: str) -> None:
    train(tmp_path, max_steps=6, replay_scope=scope, replay_buffer_size=50)
    saved = restored(tmp_path, last(tmp_path), replay_scope=scope, replay_buffer_size=50)
    assert saved["candidates"]
    found = restored(
        tmp_path, last(tmp_path), replay_scope=scope, replay_buffer_size=50, per_device_train_batch_size=4
    )
    assert found["candidates"] is None
    assert len(found["payload"]) == len(saved["payload"]) + len(saved["candidates"])
    assert set(saved["payload"].values()) < set(found["payload"].values())
    session = resume(tmp_path, Path(last(tmp_path)), replay_scope=scope, per_device_train_batch_size=4)
    assert session.update == 8


# the newest whole checkpoint


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


def test_no_file_of_ours_is_read_by_pickle(checkpoint: Path) -> None:
    """JSON and safetensors, told by their contents."""
    files = [path for path in (checkpoint / "trl_replay").rglob("*") if path.is_file()]
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.suffix == ".safetensors"
            assert path.read_bytes()[8:9] == b"{"
    assert len(files) == 4


def test_with_replay_off_a_checkpoint_with_a_buffer_is_stocks(tmp_path: Path, checkpoint: Path) -> None:
    trainer = build(tmp_path, max_steps=8)
    session = trl_replay.attach(trainer, use_replay=False)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not session.enabled
    assert torch.isfinite(next(trainer.model.parameters())).all()
