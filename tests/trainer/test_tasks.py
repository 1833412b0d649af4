"""A group belongs to the dataset row that was asked for: one prompt with several labels is several tasks."""

import json
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pyarrow.parquet
import pytest
from chat import QUESTION, TEMPLATE, chat_trainer, stored
from datasets import IterableDataset
from following import Followed, build, crossed, follow
from generating import Coins
from methods import INJECTED
from replaying import build as build_with
from support import DEAD, HALF, LIVE, Rewards, Spy, weights_hash
from teacher import rows, rows_of
from tools import tool_tokenizer

import trl_replay
from trl_replay.errors import MismatchError
from trl_replay.testing import make_model

ONE_PROMPT = [{"prompt": "1=", "label": label} for label in "abcd"]
"""Four tasks with one prompt. A batch has three groups."""
ALL_RIGHT = [1.0, 1.0, 1.0, 1.0]
SEVERAL = "ignore:Rows of the dataset with the same prompt differ in 'label':UserWarning"

pytestmark = pytest.mark.filterwarnings(SEVERAL)


@pytest.mark.parametrize(
    "replay",
    [
        INJECTED,
        {"replay_preset": "arpo"},
        {"replay_preset": "repo"},
        {**INJECTED, "replay_advantages": "split"},
        {"replay_sampler": "same_prompt"},
        {**INJECTED, "replay_task_columns": ["label"]},
    ],
    ids=["inject", "arpo", "repo", "split", "whole", "chosen"],
)
def test_66_no_answer_to_one_task_is_trained_as_anothers(tmp_path, replay):
    _, followed = follow(build(tmp_path, ONE_PROMPT), **replay)
    assert len(followed.pairs) > 3
    assert crossed(followed) == []


def test_with_the_prompt_alone_they_are_one_task(tmp_path):
    session, followed = follow(build(tmp_path, ONE_PROMPT), **INJECTED, replay_task_columns=[])
    assert crossed(followed)
    assert session.metrics["replay/tasks"] == 1
    assert set(session.buffer.table.peers.tolist()) == {len(session.buffer)}


def test_66_a_solved_task_retires_its_own_entries_alone(tmp_path):
    rewards = Rewards([LIVE, LIVE, HALF], [HALF, DEAD, DEAD], [ALL_RIGHT, DEAD, DEAD], [DEAD, DEAD, DEAD])
    session, followed = follow(
        build(tmp_path, ONE_PROMPT, rewards, max_steps=4), replay_retire_passes=4, replay_max_fraction=0.0
    )
    left = [followed.born[serial] for serial in session.buffer.table.serial.tolist()]
    assert sorted(left) == ["a", "b", "d"], "the third batch solved c"
    assert session.totals.counters["retired"] == 1


def test_a_group_that_is_generated_again_has_its_own_prompts_task(tmp_path):
    rows = [{"prompt": "1=", "label": f"{number}"} for number in range(30)]
    seen = {}

    class Noted(Coins):
        def __call__(self, completions, label, **columns):
            told.append(label[::4])
            return super().__call__(completions, **columns)

    told = []
    trainer = build(tmp_path, rows, Noted(0.15), max_steps=5)
    session = trl_replay.attach(trainer, replay_refill="new(rounds=3)", replay_start=0)
    rounds = session.step.rounds
    note = rounds.table.note

    def noting(keys, tasks, *others):
        assert keys.tolist() == tasks.tolist(), "a curriculum knows a group by the task that the buffer has"
        for key, label in zip(keys.tolist(), told[-1], strict=True):
            seen.setdefault(key, set()).add(label)
        note(keys, tasks, *others)

    rounds.table.note = noting
    trainer.train()
    assert session.totals.counters["refilled"] > 0
    assert all(len(labels) == 1 for labels in seen.values())
    assert set(session.buffer.table.prompt.tolist()) <= set(seen)


def test_a_resumed_run_knows_the_tasks_of_its_entries(tmp_path):
    def trained(folder, resume=None, born=None):
        trainer = build(tmp_path / folder, ONE_PROMPT, max_steps=12, save_strategy="steps", save_steps=5)
        if resume:
            trainer.reward_funcs[0].calls = 5
        session, followed = follow(trainer, resume, born, **INJECTED)
        return weights_hash(trainer), session.buffer.table.prompt.tolist(), followed

    whole, tasks, first = trained("whole")
    resumed, again, followed = trained("again", str(tmp_path / "whole" / "checkpoint-5"), first.born)
    assert (resumed, again) == (whole, tasks)
    assert followed.pairs
    assert crossed(followed) == []


def test_other_task_columns_do_not_resume(tmp_path):
    follow(build(tmp_path, ONE_PROMPT, max_steps=2, save_strategy="steps", save_steps=2))
    for columns, words in (([], r"was None and is \[\]"), (["label"], r"was None and is \['label'\]")):
        with pytest.raises(MismatchError, match=f"replay_task_columns {words}"):
            follow(build(tmp_path, ONE_PROMPT), str(tmp_path / "checkpoint-2"), replay_task_columns=columns)


# what is told


@pytest.mark.filterwarnings(f"default{SEVERAL.removeprefix('ignore')}")
def test_one_line_tells_what_splits_a_prompt(tmp_path):
    trainer = build(tmp_path, ONE_PROMPT, max_steps=3)
    with pytest.warns(UserWarning, match=r"same prompt differ in 'label'.*set replay_task_columns") as told:
        follow(trainer)
    assert sum("the same prompt" in str(each.message) for each in told) == 1


def test_columns_that_a_streams_rows_do_not_have_are_refused(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(ONE_PROMPT * 32))
    assert stream.column_names is None
    trainer = build_with(tmp_path, Rewards([LIVE, LIVE, LIVE]), arguments={"train_dataset": stream})
    trainer.watch = None
    trl_replay.attach(trainer, replay_task_columns=["labl"])
    with pytest.raises(trl_replay.ConfigurationError, match=r"replay_task_columns=\['labl'\].*no column 'labl'"):
        trainer.train()


# environments


class Riddle:
    """Each group gets one of four riddles, and its text says which. The dataset's rows do not."""

    resets = 0

    def reset(self, **columns):
        self.secret = Riddle.resets // 4 % 4
        Riddle.resets += 1
        return self._text()

    def _text(self):
        return f" {self.secret}"


class Secret(Riddle):
    """Texts differ from rollout to rollout, and nothing says which riddle it is."""

    def _text(self):
        return f" {Riddle.resets}"


class Told(Secret):
    """The environment says it."""

    @property
    def task_id(self):
        return self.secret


class Odd(Riddle):
    """An object whose word about itself can't be compared."""

    task_id = object()


def riddled(tmp_path, environment, **replay):
    """Trains on an environment that owns its data."""
    tokenizer = tool_tokenizer()
    Riddle.resets = 0
    script = [[LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [HALF, DEAD, LIVE], [DEAD, DEAD, LIVE], [LIVE, HALF, DEAD]]
    trainer = build_with(
        tmp_path, Rewards(*script * 2), (), tokenizer, make_model(tokenizer, max_position_embeddings=256), Spy,
        arguments={"environment_factory": environment, "train_dataset": None}, max_steps=8,
    )  # fmt: skip
    return follow(trainer, **replay)


@pytest.mark.parametrize("environment", [Riddle, Told])
def test_an_environments_tasks_are_told_apart(tmp_path, environment):
    session, followed = riddled(tmp_path, environment, **INJECTED)
    assert len(followed.pairs) > 3
    assert crossed(followed) == []
    assert session.metrics["replay/tasks"] == 4


def test_66_groups_whose_task_nobody_tells_are_matched_by_none(tmp_path):
    session, followed = riddled(tmp_path, Secret, **INJECTED)
    assert followed.pairs == []
    stored = session.buffer.table.prompt.tolist()
    assert len(stored) == len(set(stored)) > 4
    assert max(stored) < 0
    assert "24 x a group counts as a task of its own: its prompts differ, and its environment has no task_id" in (
        session.explain()
    )
    session, _ = riddled(tmp_path, Secret, replay_retire_passes=2)
    assert session.totals.counters["retired"] == 0
    assert session.totals.counters["replaced"] > 0, "whole groups need no task"


def test_a_task_id_without_content_is_refused(tmp_path):
    with pytest.raises(trl_replay.SeamError, match=r"task_id can't tell tasks apart: it holds a object. Use a text"):
        riddled(tmp_path, Odd)


# files


NESTED = [{"prompt": "1=", "label": label, "tests": [{"in": label, "out": 0.5}], "score": 2} for label in "abcd"]


@pytest.mark.filterwarnings("ignore:Rows of the dataset with the same prompt differ")
@pytest.mark.parametrize("read", ["parquet", "rows", "jsonl"])
def test_66_and_151_groups_of_an_export_meet_their_own_task_alone(tmp_path, read):
    first = build(tmp_path / "first", NESTED, Rewards([LIVE, HALF, LIVE]), max_steps=4)
    path = follow(first, replay_dry_run=True)[0].export(tmp_path / "groups.parquet")
    rows = pyarrow.parquet.read_table(path).to_pylist()
    lines = tmp_path / "groups.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    trainer = build(tmp_path / "second", NESTED, Rewards([DEAD, DEAD, DEAD]), max_steps=5)
    session = trl_replay.attach(trainer, **INJECTED)
    session.add({"parquet": path, "rows": rows, "jsonl": lines}[read])
    assert sorted(session.buffer.table.prompt.tolist()) == sorted(row["trl_replay_task"] for row in rows[::4])
    keys = {session.components.tasks.key(row): row["label"] for row in NESTED}
    tasks = zip(session.buffer.table.serial.tolist(), session.buffer.table.prompt.tolist(), strict=True)
    followed = Followed(session, {serial: keys[task] for serial, task in tasks})
    trainer.train()
    assert len(followed.pairs) > 3
    assert crossed(followed) == []


def test_groups_that_are_added_before_training_are_of_the_tasks_that_it_trains_on(tmp_path):
    """`remove_unused_columns` leaves the prompt alone."""
    dataset = [{"prompt": prompt, "label": prompt} for prompt in ("1=", "12=", "123=")]
    trainer = build(tmp_path, dataset, Rewards([LIVE, LIVE, LIVE]), max_steps=2, remove_unused_columns=True)
    session = trl_replay.attach(trainer)
    session.add(rows())
    (added,) = session.buffer.table.prompt.tolist()
    trainer.train()
    assert added in session.buffer.table.prompt.tolist()[1:]


def test_a_date_in_the_rendered_prompt_tells_no_tasks_apart(tmp_path):
    """A task goes by the dataset's row; tokens of a stored prompt stay those that its completions answered."""
    trainer = chat_trainer(tmp_path, template="{{ strftime_now('%d') }}" + TEMPLATE, max_steps=2)
    trainer.reward_funcs[0].batches = ([LIVE] * 3,)
    session = trl_replay.attach(trainer)
    first = datetime(2026, 11, 28)
    clock = mock.Mock(now=lambda: first + timedelta(days=trainer.state.global_step))
    with mock.patch("transformers.utils.chat_template_utils.datetime", clock):
        trainer.train()
        session.add(rows_of(QUESTION, [[{"role": "assistant", "content": text}] for text in "1234"], LIVE))
    days = [stored(session, serial, "prompt_ids")[0][:2] for serial in session.buffer]
    assert days == ["28"] * 3 + ["29"] * 3 + ["30"]
    assert set(session.buffer.table.prompt.tolist()) == {session.components.tasks.key({"prompt": QUESTION})}


def test_the_templates_of_trl_that_say_todays_date_are_named():
    (row,) = [
        line
        for line in (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text().splitlines()
        if "today's date" in line
    ]
    templates = [path for path in (files("trl") / "chat_templates").iterdir() if path.name.endswith(".jinja")]
    dated = {
        path.name.removesuffix(".jinja").removesuffix("_training")
        for path in templates
        if "strftime_now" in path.read_text()
    }
    assert dated
    assert [name for name in dated if f"`{name}`" not in row] == []
