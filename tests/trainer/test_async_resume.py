"""A run of AsyncGRPOTrainer that is resumed at any boundary goes on bit for bit as if it had not been interrupted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from queued import DEAD, LIVE, Script, make_async_trainer, make_policy, samples_of, stand_in, watch
from transformers import TrainerCallback

import trl_replay
from trl_replay import compat

STEPS = 8


@pytest.fixture(scope="module")
def policy(tmp_path_factory: Any) -> Any:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: Any) -> None:
    stand_in(monkeypatch)


def mixed(number: int, version: int) -> list[Any]:
    return samples_of(number, DEAD if number % 3 else LIVE, version, forks=1 + (number % 2))


class KeepWorker(TrainerCallback):
    """Keeps what the worker holds whenever a checkpoint is written: its own state is not the trainer's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kept: dict[int, tuple[int, list[Any], int]] = {}

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        worker = self.trainer.rollout_worker
        self.kept[state.global_step] = worker.next, copy.deepcopy(worker.waiting), worker.version


def run(policy: Any, folder: Path, worker: Script, resume: str | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    trainer = make_async_trainer(
        folder, policy, worker, max_steps=STEPS, save_strategy="steps", save_steps=1, gradient_accumulation_steps=2
    )
    session = trl_replay.attach(trainer, replay_start=None, replay_buffer_size=6, **settings)
    seen = watch(trainer)
    keeps = KeepWorker(trainer)
    trainer.add_callback(keeps)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, session, seen, keeps


@pytest.fixture(scope="module")
def whole(policy: Any, tmp_path_factory: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        folder = tmp_path_factory.mktemp("whole")
        return folder, *run(policy, folder, Script(mixed))


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resumed_at_any_boundary_training_goes_on_bit_for_bit(
    policy: Any, whole: Any, tmp_path: Any, step: int
) -> None:
    folder, _, session, seen, keeps = whole
    number, waiting, version = keeps.kept[step]
    worker = Script(mixed, first=number)
    worker.waiting = copy.deepcopy(waiting)
    for sample in worker.waiting:
        sample.model_version += 1 - version  # TRL counts versions from the first sync again
    _, resumed, again, _ = run(policy, tmp_path, worker, str(folder / f"checkpoint-{step}"))
    rest = seen[2 * step :]
    assert len(again) == len(rest) > 0
    for (inputs, loss), (expected, expected_loss) in zip(again, rest, strict=True):
        assert loss == expected_loss
        for key, value in expected.items():
            assert torch.equal(inputs[key], value), key
    assert session.totals.counters["replaced"] > 3, "something is replayed"
    for name in session.buffer.table.names:
        assert np.array_equal(
            getattr(resumed.buffer.table, name), getattr(session.buffer.table, name), equal_nan=True
        ), name
    assert resumed.totals.counters == session.totals.counters
    assert (resumed.queue.dropped, resumed.queue.waited) == (session.queue.dropped, session.queue.waited)
    assert resumed.update == STEPS


def test_groups_in_a_checkpoint_are_told_to_trls_own_worker_as_done(policy: Any, tmp_path: Any) -> None:
    """TRL's worker resumes at the first group that is not trained on: those that the checkpoint holds must not pin
    it, and groups that were dropped must not."""

    class AsyncRolloutWorker(Script):
        """Of the name of TRL's, which has no vLLM here."""

    worker = AsyncRolloutWorker(mixed)
    trainer = make_async_trainer(tmp_path, policy, worker, max_steps=3)
    session = trl_replay.attach(trainer, replay_start=None)
    trainer.train()
    before = set(compat.trained_groups(trainer))
    worker.waiting += mixed(90, 1) + mixed(93, 1)[:1]
    while session.queue.get(timeout=0.01).group_id != 90:  # what the trainer has not fetched comes first
        session.queue.end()
    for _ in range(3):
        session.queue.get(timeout=0.01)
    session.queue._receive(0.0)
    with session.saving():
        told = set(compat.trained_groups(trainer))
        state = session.queue.state_dict()
    assert told - before == {90}, "and not the one of which samples are still to come"
    assert compat.trained_groups(trainer) == before
    assert {one["group_id"] for one in state["samples"]} == {90}
    assert not state["open"]
    session.load_state_dict({**session.state_dict(), "queue": state})
    ids = {session.queue.get(timeout=0.01).group_id for _ in range(len(state["samples"]))}
    assert len(ids) == 1
    assert min(ids) < 0, "its numbers begin anew: the saved group must not count as another"


def test_122_a_live_group_that_was_half_fetched_is_generated_again(policy: Any, tmp_path: Any) -> None:
    """Though the trainer has trained on its first samples, and counts it as done."""

    class AsyncRolloutWorker(Script):
        """Of the name of TRL's."""

    script = AsyncRolloutWorker(lambda number, version: samples_of(number, LIVE, version))
    trainer = make_async_trainer(
        tmp_path, policy, script, max_steps=1, token_budget=24, save_strategy="steps", save_steps=1
    )
    session = trl_replay.attach(trainer, replay_start=None)
    told: list[set[int]] = []
    begun: list[set[int]] = []

    class Note(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            begun.append(set(session.queue._open) & compat.trained_groups(trainer))
            with session.saving():
                told.append(set(compat.trained_groups(trainer)))
            assert begun[0] <= compat.trained_groups(trainer), "it is counted again"

    trainer.add_callback(Note())
    trainer.train()
    assert begun[0]
    assert not begun[0] & told[0]


def test_a_checkpoint_of_another_trainer_kind_or_without_replay_is_told(policy: Any, tmp_path: Any) -> None:
    trainer = make_async_trainer(tmp_path, policy, Script(mixed), max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    again = make_async_trainer(tmp_path, policy, Script(mixed), max_steps=3)
    trl_replay.attach(again)
    with pytest.warns(UserWarning, match="holds no replay buffer"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_damaged_checkpoint_is_refused(policy: Any, tmp_path: Any) -> None:
    run(policy, tmp_path, Script(mixed))
    table = next((tmp_path / "checkpoint-4" / "trl_replay").rglob("table.safetensors"))
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    with pytest.raises(trl_replay.CheckpointError):
        run(policy, tmp_path, Script(mixed), str(tmp_path / "checkpoint-4"))
