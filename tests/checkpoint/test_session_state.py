"""A session's state: resuming is bit-identical to the run that never stopped, wherever stock's own resume is."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from methods import EVERY_GROUP
from replaying import build as trainer_of
from resuming import (
    Curriculum,
    build,
    differences,
    everything,
    interrupted,
    last,
    restored,
    resume,
    runs,
    state,
    train,
)
from support import DEAD, HALF, LIVE, Rewards, plugin
from transformers import TrainerCallback
from trl import GRPOTrainer

import trl_replay
from trl_replay import CheckpointError, hookimpl
from trl_replay.checkpoint import format as saved
from trl_replay.checkpoint.saving import GONE, REPLACED
from trl_replay.errors import MismatchError
from trl_replay.testing import make_trainer

RUNS = dict(runs())


@pytest.mark.parametrize("name", RUNS)
def test_22_resuming_is_bit_identical_to_the_run_that_never_stopped(tmp_path, plug, name):
    plug(Curriculum(), "curriculum")
    whole, differences = interrupted(tmp_path, **RUNS[name])
    assert not differences
    counter = {"rounds": "refilled", "further iterations": "iterated"}.get(name.partition(",")[0], "replaced")
    assert whole["totals"][1][counter] > 0


@pytest.mark.parametrize("scope", ["process", "gathered"])
@pytest.mark.parametrize(
    "layout",
    [
        {"num_iterations": 2},
        {"per_device_train_batch_size": 6, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"rows": 9, "shuffle_dataset": True},
    ],
    ids=["two iterations", "two updates a generation", "a second shuffled epoch"],
)
def test_in_the_middle_of_a_cycle_everything_comes_back_as_it_was_saved(tmp_path, scope, layout):
    """The fifth update is the first of two on its generation batch, or in a second epoch of nine prompts, which stock
    shuffles anew when it resumes."""
    saved = {}

    def watched(trainer):
        write = trainer._save_checkpoint

        def save(*args, **kwargs):
            write(*args, **kwargs)
            saved.update(state(write.session))

        trainer.__dict__["_save_checkpoint"] = save

    trainer = build(tmp_path, max_steps=5, save_steps=5, **layout)
    session = trl_replay.attach(trainer, replay_buffer_size=5, replay_scope=scope)
    watched(trainer)
    trainer.train()
    found = restored(tmp_path, last(tmp_path), replay_scope=scope, **layout)
    assert not differences(saved, found)
    _, session = train(tmp_path, resume=last(tmp_path), max_steps=9, save_steps=20, replay_scope=scope, **layout)
    assert session.update == 9
    assert session.totals.batches > saved["totals"][0]


class Counting:
    """A sampler with running statistics."""

    def __init__(self):
        self.calls = 0

    def __call__(self, table, count, context):
        self.calls += 1
        return np.arange(len(table))[:: -1 if self.calls % 2 else 1][:count]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_51_a_strategys_running_state_and_a_plugins_columns_and_files_come_back(tmp_path):
    class Plugin:
        def __init__(self):
            self.batches = 0
            self.folders = []

        @hookimpl
        def trl_replay_attached(self, session):
            session.buffer.table.add_column("seen", fill=-1.0)

        @hookimpl
        def trl_replay_metrics(self, context):
            self.batches += 1
            context.table.seen[:] = self.batches

        @hookimpl
        def trl_replay_save(self, session, directory):
            (directory / "batches.json").write_text(json.dumps(self.batches))

        @hookimpl
        def trl_replay_load(self, session, directory):
            self.batches = json.loads((directory / "batches.json").read_text())
            self.folders.append(directory)

    def run(folder, **settings):
        plugin, sampler = Plugin(), Counting()
        trl_replay.register(plugin, "one two")
        try:
            found = train(folder, replay_plugins="one two", replay_sampler=sampler, **settings)
        finally:
            trl_replay.unregister("one two")
        return everything(*found), plugin, sampler

    whole, plugin, sampler = run(tmp_path / "whole")
    run(tmp_path / "cut", max_steps=6)
    resumed, other, counting = run(tmp_path / "cut", resume=last(tmp_path / "cut"))
    assert not differences(whole, resumed)
    assert set(whole["columns"]["seen"]) != {-1.0}
    assert (other.batches, counting.calls) == (plugin.batches, sampler.calls)
    assert [folder.name for folder in other.folders] == ["one two"], "a folder of its own"


def test_a_column_that_nothing_has_added_before_training_resumes_is_told(tmp_path):
    def add(table, rows, groups, context):
        if "seen" not in table.names:
            table.add_column("seen")

    with plugin(admitted=add) as names:
        train(tmp_path, replay_plugins=names, max_steps=6)
        with pytest.warns(UserWarning, match="lose their columns seen: add them in trl_replay_attached, to resume"):
            train(tmp_path, replay_plugins=names, resume=last(tmp_path))


def other_tokenizer(folder):
    trainer = build(folder, max_steps=8)
    trainer._tokenizer.add_tokens(["ü"])
    return trainer


def test_what_was_saved_under_other_settings_is_refused_with_both_values(tmp_path, checkpoint):
    refused = "does not fit this run: "
    with pytest.raises(
        MismatchError, match=rf"{refused}num_generations was 4 and is 6; replay_scope.* of then"
    ) as raised:
        resume(tmp_path, checkpoint, num_generations=6, replay_scope="gathered")
    assert f"To go on with an empty buffer, remove the folder {checkpoint / 'trl_replay'}." in str(raised.value)
    with pytest.raises(MismatchError, match=rf"{refused}replay_scope was 'process' and is 'gathered'\."):
        resume(tmp_path, checkpoint, replay_scope="gathered")
    with pytest.raises(MismatchError, match=rf"{refused}the tokenizer's fingerprint was '\w+' and is '\w+'\."):
        resume(tmp_path, checkpoint, trainer=other_tokenizer(tmp_path))


class Stateful:
    """A first in, first out evictor with a state of any kind, but for those that it does not know any more."""

    def __init__(self, kept, *unknown):
        self.kept = kept
        self.unknown = unknown

    def __call__(self, table, context):
        return table.serial

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]
        if self.kept in self.unknown:
            raise ValueError(f"version {self.kept} is not known")


def test_67_a_strategy_that_cant_take_its_saved_state_is_named_with_the_checkpoint(tmp_path):
    train(tmp_path, replay_evictor=Stateful(1), max_steps=6)
    with pytest.raises(CheckpointError, match=r"checkpoint-6.*evictor.*Stateful.*version 1 is not known"):
        train(tmp_path, replay_evictor=Stateful(2, 1), resume=str(tmp_path / "checkpoint-6"))


class Other(Stateful):
    """Of another name: what it keeps is not what the first one kept."""


def test_51_a_checkpoint_that_another_strategy_wrote_resumes_without_its_state(tmp_path):
    train(tmp_path, replay_evictor=Stateful(1), max_steps=6)
    other, same = Other(2), Stateful(2)
    with pytest.warns(UserWarning, match="The evictor in this checkpoint was '.*Stateful'"):
        session = resume(tmp_path, tmp_path / "checkpoint-6", replay_evictor=other)
    assert (other.kept, session.update) == (2, 8)
    resume(tmp_path, tmp_path / "checkpoint-6", replay_evictor=same)
    assert same.kept == 1, "without a word"


class Remembering:
    """A plugin whose one number travels with checkpoints."""

    def __init__(self, number, fails=False):
        self.number = number
        self.fails = fails

    @hookimpl
    def trl_replay_save(self, session, directory):
        (directory / "number").write_text(str(self.number))

    @hookimpl
    def trl_replay_load(self, session, directory):
        self.number = int((directory / "number").read_text())
        if self.fails:
            self.fails = False
            raise ValueError("one number too many")


def test_67_a_load_hook_that_fails_is_named_with_the_checkpoint_and_leaves_the_buffer_empty(tmp_path, plug):
    plug(Remembering(1), "first")
    plug(second := Remembering(1), "second")
    train(tmp_path, replay_plugins=["first", "second"], max_steps=6)
    second.fails = True
    trainer = build(tmp_path)
    session = trl_replay.attach(trainer, replay_plugins=["first", "second"])
    with pytest.raises(CheckpointError, match=r"checkpoint-6.*Plugin 'second'.*trl_replay_load.*too many"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert len(session.buffer) == 0, "nothing half-restored is trained on, should it be called again"


def test_165_entries_longer_than_completions_may_be_now_leave_when_training_resumes(tmp_path):
    """Whoever ran out of memory resumes with a smaller `max_completion_length`; the batches may be smaller, too."""
    widths = []

    class Watching(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            widths.append(inputs["completion_ids"].size(1))
            return super()._compute_loss(model, inputs)

    train(tmp_path, max_completion_length=64, max_steps=6, replay_buffer_size=12)
    (then,) = saved.read_all(last(tmp_path))
    longest = dict(zip(then.columns["serial"].tolist(), then.columns["row_length"].max(axis=1).tolist(), strict=True))
    fitting = {serial for serial, length in longest.items() if length <= 60}
    assert 1 < len(fitting) < len(longest) - 1
    dropped = "x an entry was dropped: a completion is longer than max_completion_length=60"
    for rows, limit in ((12, 60), (8, 60), (12, 65)):
        settings = {"max_completion_length": limit, "per_device_train_batch_size": rows, "max_steps": 8}
        trainer = build(tmp_path, trainer_class=Watching, save_strategy="no", **settings)
        widths.clear()
        _, session = train(tmp_path, last(tmp_path), trainer, replay_buffer_size=12, **EVERY_GROUP)
        assert (f"{len(longest) - len(fitting)} {dropped}" in session.explain()) == (limit == 60)
        assert max(widths) <= limit


@pytest.mark.parametrize(
    ("kept", "loaded"),
    [
        (np.float32(0.5), 0.5),
        ((1, 2.5), [1, 2.5]),
        ({"a": [np.int64(3), None, True, "ü"]}, {"a": [3, None, True, "ü"]}),
        (float("inf"), float("inf")),
    ],
)
def test_what_json_can_hold_of_a_strategys_state_comes_back(tmp_path, kept, loaded):
    train(tmp_path, max_steps=6, replay_evictor=Stateful(kept))
    evictor = Stateful(None)
    resume(tmp_path, tmp_path / "checkpoint-6", replay_evictor=evictor)
    assert evictor.kept == loaded


@pytest.mark.parametrize(
    ("kept", "words"), [({2: 1, 10: 2}, "the key 2"), (np.zeros(2), r"array\(\[0., 0.\]\)"), ({1}, r"\{1\}")]
)
def test_what_json_cannot_bring_back_is_refused_when_it_is_saved(tmp_path, kept, words):
    with pytest.raises(
        CheckpointError, match=f"The evictor's state_dict.* gives {words}, which JSON can't bring back"
    ):
        train(tmp_path, max_steps=6, replay_evictor=Stateful(kept))


def test_resuming_from_the_end_settles_what_was_pending_and_ends(tmp_path):
    """Stock does one update more."""
    _, whole = train(tmp_path, max_steps=6, replay_buffer_size=50)
    trainer, session = train(tmp_path, max_steps=6, resume=str(tmp_path / "checkpoint-6"), replay_buffer_size=50)
    assert session.update == trainer.state.global_step
    assert session.step.carry.pending is None
    assert set(session.buffer.table.serial.tolist()) >= set(whole.buffer.table.serial.tolist())


def test_resuming_again_and_again_from_one_checkpoint_is_always_the_same(tmp_path):
    trainer, session = train(tmp_path)
    whole, folder = everything(trainer, session), tmp_path / "checkpoint-6"
    for _ in range(2):
        trainer._step, trainer._buffered_inputs = 0, None  # TRL's own, which stock does not reset either
        trainer.train(resume_from_checkpoint=str(folder))
        assert not differences(whole, everything(trainer, session))


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_a_checkpoint_in_the_middle_of_an_update_loses_nothing(tmp_path, scope):
    """As on SIGTERM (`enable_jit_checkpoint`): gradients are there, the optimizer has not moved."""

    saved = []

    class Save(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3:
                trainer._save_checkpoint(trainer.model, trial=None)
                saved.append(take())
                raise KeyboardInterrupt

    def take():
        return state(session)

    trainer = build(tmp_path, save_strategy="no")
    trainer.add_callback(Save())
    session = trl_replay.attach(trainer, replay_scope=scope, replay_buffer_size=50)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    folder = trl_replay.last_complete_checkpoint(tmp_path)
    assert folder == str(tmp_path / "checkpoint-3")
    assert not differences(saved[0], restored(tmp_path, folder, replay_scope=scope, replay_buffer_size=50))
    _, resumed = train(tmp_path, resume=folder, max_steps=8, replay_scope=scope, replay_buffer_size=50)
    assert resumed.update == 8
    kept = set(resumed.buffer.table.serial.tolist())
    assert kept >= {*saved[0]["columns"]["serial"]}


@pytest.mark.parametrize("scope", ["process", "gathered"])
def test_an_empty_buffer_makes_the_round_trip(tmp_path, scope):
    def zero(completions, **_):
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, zero, max_steps=2, save_strategy="steps", save_steps=2)
    train(tmp_path, trainer=trainer, replay_scope=scope)
    again = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    _, session = train(tmp_path, trainer=again, resume=str(tmp_path / "checkpoint-2"), replay_scope=scope)
    assert session.totals.batches == 4
    assert len(session.buffer) == 4


ROWS = tuple({"prompt": prompt, "label": prompt[0]} for prompt in ("1=", "12=", "123+4="))
GROUP = (("1", 1.0), ("2", 0.0), ("3", 0.0), ("4", 0.0))
ALIVE = Rewards([LIVE, LIVE, LIVE])


def run_of(folder, updates, with_replay=True):
    """A checkpoint of a run of so many updates on all rows."""
    trainer = trainer_of(folder, ALIVE, ROWS, max_steps=updates, save_strategy="steps", save_steps=updates)
    if with_replay:
        trl_replay.attach(trainer)
    trainer.train()
    return last(folder)


CHANGED = {
    "as it was": ROWS,
    "a row is gone": ROWS[1:],
    "a label was corrected": ({**ROWS[0], "label": "7"}, *ROWS[1:]),
}


@pytest.mark.parametrize("change", CHANGED)
def test_188_groups_whose_row_is_no_longer_in_the_dataset_leave_when_training_resumes(tmp_path, change):
    checkpoint = run_of(tmp_path, 4)
    trainer = trainer_of(tmp_path, ALIVE, CHANGED[change], max_steps=4)
    session = trl_replay.attach(trainer)
    kept = {session.components.tasks.key(row) for row in CHANGED[change]}
    told = pytest.warns(UserWarning, match="of the dataset that it was generated for is gone")
    with told if change != "as it was" else nullcontext():
        trainer.train(resume_from_checkpoint=checkpoint)
    stored = set(session.buffer.table.prompt.tolist())
    assert stored
    assert stored <= kept
    assert (GONE in session.explain()) == (change != "as it was")


def test_188_a_group_of_the_last_batch_whose_row_left_the_dataset_is_counted(tmp_path):
    checkpoint = run_of(tmp_path, 1)
    trainer = trainer_of(tmp_path, ALIVE, (*ROWS[1:], {"prompt": "2=", "label": "2"}), max_steps=2)
    session = trl_replay.attach(trainer)
    with pytest.warns(UserWarning, match="1 stored groups left the replay buffer: the row of the dataset"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert [count for reason, count in session.totals.reasons.items() if GONE in reason] == [1]
    assert len(session.buffer) == 5  # two of the batch before, and the three of the batch after


@pytest.mark.parametrize("with_replay", [True, False])
def test_188_groups_added_before_training_resumes_are_counted_and_told(tmp_path, with_replay):
    checkpoint = run_of(tmp_path, 4, with_replay)
    trainer = trainer_of(tmp_path, ALIVE, ROWS, max_steps=6)
    session = trl_replay.attach(trainer)
    rows = [{"prompt": "1=", "completion": text, "label": "1", "reward": reward} for text, reward in GROUP]
    assert session.add(rows) == 1
    left = pytest.warns(UserWarning, match="1 groups that were added to the replay buffer left it.*on_train_begin")
    with left, nullcontext() if with_replay else pytest.warns(UserWarning, match="holds no replay buffer"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert REPLACED in session.explain()
    assert 1 not in session.buffer.table.origin


def test_188_a_dataset_that_can_not_be_asked_is_said_so_when_training_resumes(tmp_path):
    checkpoint = run_of(tmp_path, 4)
    trainer = trainer_of(tmp_path, ALIVE, ROWS, max_steps=4)
    trainer.train_dataset.set_transform(lambda batch: batch)
    session = trl_replay.attach(trainer)
    with pytest.warns(UserWarning, match=r"can't be told: it has a transform \(set_transform\)"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert len(session.buffer)
