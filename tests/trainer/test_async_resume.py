"""A run of AsyncGRPOTrainer that is resumed at any boundary goes on bit for bit as if it had not been interrupted."""

import copy

import numpy as np
import pytest
import torch
from queued import DEAD, LIVE, Queued, Script, all_live, samples_of, stand_in, watch
from transformers import TrainerCallback
from trl_replay_async import compat as asynchronous

STEPS = 8
SAVES = {"save_strategy": "steps", "save_steps": 1}
SETTINGS = {**SAVES, "max_steps": STEPS, "gradient_accumulation_steps": 2, "replay_buffer_size": 6}


def mixed(number, version):
    return samples_of(number, DEAD if number % 3 else LIVE, version, forks=1 + (number % 2))


class KeepWorker(TrainerCallback):
    """Keeps what the worker holds whenever a checkpoint is written: its own state is not the trainer's."""

    def __init__(self, worker):
        self.worker = worker
        self.kept = {}

    def on_save(self, _args, state, _control, **_):
        self.kept[state.global_step] = self.worker.next, copy.deepcopy(self.worker.waiting), self.worker.version


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """The folder of a run with a checkpoint after each update, the run, what it trained on, and its worker by then."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        folder = tmp_path_factory.mktemp("whole")
        torch.manual_seed(0)
        run = Queued(folder, policy, mixed, **SETTINGS)
        seen, keeps = watch(run.trainer), KeepWorker(run.worker)
        run.trainer.add_callback(keeps)
        return folder, run.train(), seen, keeps.kept


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resumed_at_any_boundary_training_goes_on_bit_for_bit(queued, whole, step):
    folder, run, seen, kept = whole
    number, waiting, version = kept[step]
    worker = Script(mixed, first=number)
    worker.waiting = copy.deepcopy(waiting)
    for sample in worker.waiting:
        sample.model_version += 1 - version  # TRL counts versions from the first sync again
    torch.manual_seed(0)
    resumed = queued(worker, **SETTINGS)
    again = watch(resumed.trainer)
    resumed.trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    rest = seen[2 * step :]
    assert len(again) == len(rest) > 0
    for (inputs, loss), (expected, expected_loss) in zip(again, rest, strict=True):
        assert loss == expected_loss
        for key, value in expected.items():
            assert torch.equal(inputs[key], value), key
    assert run.counters["replaced"] > 3, "something is replayed"
    found, table = resumed.session.buffer.table, run.session.buffer.table
    for name in table.names:
        assert np.array_equal(getattr(found, name), getattr(table, name), equal_nan=True), name
    assert resumed.counters == run.counters
    assert (resumed.queue.dropped, resumed.queue.waited) == (run.queue.dropped, run.queue.waited)
    assert resumed.session.update == STEPS


class AsyncRolloutWorker(Script):
    """Of the name of TRL's, which has no vLLM here."""


def test_groups_in_a_checkpoint_are_told_to_trls_own_worker_as_done(queued):
    """TRL's worker resumes at the first group that is not trained on: those that the checkpoint holds must not pin
    it, and groups that were dropped must not."""
    run = queued(AsyncRolloutWorker(mixed), max_steps=3).train()
    session, queue = run.session, run.queue
    before = set(asynchronous.trained_groups(run.trainer))
    run.worker.waiting += mixed(90, 1) + mixed(93, 1)[:1]
    while run.get(1)[0].group_id != 90:  # what the trainer has not fetched comes first
        queue.end()
    run.get(3)
    queue._receive(0.0)
    with session.saving():
        told = set(asynchronous.trained_groups(run.trainer))
        state = queue.state_dict()
    assert told - before == {90}, "and not the one of which samples are still to come"
    assert asynchronous.trained_groups(run.trainer) == before
    assert {one["group_id"] for one in state["samples"]} == {90}
    assert not state["open"]
    session.load_state_dict({**session.state_dict(), "queue": state})
    ids = {sample.group_id for sample in run.get(len(state["samples"]))}
    assert len(ids) == 1
    assert min(ids) < 0, "its numbers begin anew: the saved group must not count as another"


def test_122_a_live_group_that_was_half_fetched_is_generated_again(queued):
    """Though the trainer has trained on its first samples, and counts it as done."""
    run = queued(AsyncRolloutWorker(all_live), max_steps=1, token_budget=24, **SAVES)
    told, begun = [], []

    class Note(TrainerCallback):
        def on_save(self, *_, **__):
            begun.append(set(run.queue._open) & asynchronous.trained_groups(run.trainer))
            with run.session.saving():
                told.append(set(asynchronous.trained_groups(run.trainer)))
            assert begun[0] <= asynchronous.trained_groups(run.trainer), "it is counted again"

    run.trainer.add_callback(Note())
    run.train()
    assert begun[0]
    assert not begun[0] & told[0]
