"""Rewards that change while the buffer lives: stored groups are valid under the rule that scored them."""

import functools
import importlib.util
import json
import linecache
import sys

import numpy as np
import pytest
import torch
from scenarios import train
from support import DEAD, HALF, LIVE, Act, Rewards
from transformers import TrainerCallback

import trl_replay
from trl_replay import ReplayError
from trl_replay.buffer.replay_buffer import MANY_RULES, OTHER_RULE, RULE_CHANGED
from trl_replay.checkpoint import format as saved
from trl_replay.testing import make_trainer

GRADES = [0.0, 1.0, 2.0, 3.0]
FIRST = ([LIVE, GRADES, HALF], [DEAD, DEAD, LIVE])
SECOND = ([[0, 0, 1, 1.0], [5, 1, 1, 0.0], [0, 1.0, 1, 0]], [DEAD, DEAD, LIVE])
SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
CHOSEN = {"replay_selector": "always(share=0.4)", "replay_record": "forward"}
LEFT = f"an entry left: {OTHER_RULE}"
pytestmark = pytest.mark.filterwarnings(f"ignore:{RULE_CHANGED}")


def functions():
    return [Rewards(*FIRST, name="form"), Rewards(*SECOND, name="accuracy")]


def weigh(*weights):
    return lambda session: session.trainer.reward_weights.copy_(torch.tensor(weights))


def scale(session):
    session.trainer.scale_rewards = "none"


def name(session):
    session.trainer.reward_func_names[0] = "other"


def another(session):
    session.trainer.reward_funcs[1] = lambda completions, **_: [0.0, 1.0] * (len(completions) // 2)


@pytest.mark.parametrize("change", [weigh(0.0, 3.0), scale, name, another])
def test_153_groups_that_another_rule_scored_leave_and_those_that_wait_are_refused(tmp_path, change):
    given = {"rewards": functions(), "at": {2: change}}
    with pytest.warns(UserWarning, match=RULE_CHANGED) as caught:
        run = train(tmp_path, **given, replay_sampler="newest")
    assert (run.table.update >= 2).all()
    assert run.reasons[LEFT] > 0
    assert any(OTHER_RULE in reason and "left" not in reason for reason in run.reasons), "the last batch's candidates"
    assert sum(str(one.message).startswith(RULE_CHANGED) for one in caught) == 1


def test_153_a_schedule_of_weights_leaves_nothing_and_says_so_once(tmp_path, recwarn):
    at = {step: weigh(1.0 + step) for step in range(1, 6)}
    run = train(tmp_path, [LIVE, HALF, DEAD], at=at, max_steps=6, replaced=0)
    told = [str(one.message) for one in recwarn if str(one.message).startswith(RULE_CHANGED)]
    assert ["schedule" in one for one in told] == [False, True], "at the first change and at the third"
    assert MANY_RULES == 3
    assert run.logged("replay/replaced_fraction")[1:] == [0.0] * 5


@pytest.mark.parametrize("change", ["weights", "a function less", "a function more", "nothing"])
def test_153_resumed_with_other_rewards_entries_leave(tmp_path, change):
    made = functions()[:1] if change == "a function more" else functions()
    train(tmp_path / "a", rewards=made, **SAVES)
    rewards = functions()[:1] if change == "a function less" else functions()
    weights = [0.0, 1.0] if change == "weights" else None
    run = train(
        tmp_path / "b", rewards=rewards, max_steps=3, reward_weights=weights,
        resume=str(tmp_path / "a" / "checkpoint-2"),
    )  # fmt: skip
    assert (run.table.update < 2).any() == (change == "nothing")
    assert run.reasons[LEFT] == (0 if change == "nothing" else 4)


EDITED = """
LEAST = 0

def helper(text):
    return len(text) % 3

def graded(completions, **_):
    return [float(helper(text) + (len(text) > 100 + LEAST)) for text in completions]

def unrelated():
    return 1
"""


def written(folder, source):
    """A reward function of a module, as a new process imports it."""
    path = folder / "rewards.py"
    path.write_text(source)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location("rewards_of_a_user", path)
    module = sys.modules["rewards_of_a_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.graded


@pytest.mark.parametrize(
    ("old", "new", "leaves"),
    [
        ("% 3", "% 2", True),
        ("LEAST = 0", "LEAST = 1", True),
        ("> 100", "> 101", True),
        ("return 1", "return 2", False),
        ("% 3", "% 3  # a comment", False),
    ],
)
@pytest.mark.generates
def test_153_an_edited_reward_file_is_told_when_training_resumes(tmp_path, recwarn, old, new, leaves):
    train(tmp_path / "a", rewards=written(tmp_path, EDITED), **SAVES)
    rewards = written(tmp_path, EDITED.replace(old, new))
    run = train(tmp_path / "b", rewards=rewards, max_steps=3, resume=str(tmp_path / "a" / "checkpoint-2"))
    assert (run.table.update < 2).any() != leaves
    assert any("the source of 'graded'" in str(one.message) for one in recwarn) == leaves


CALLS = 0
WORDS = ("a", "7")


def log():
    global CALLS
    CALLS += 1


def with_a_helper_that_counts(completions, **_):
    log()
    return [float(any(word in text for word in WORDS) + CALLS % 1) for text in completions]


def with_a_closure_that_counts():
    calls = 0

    def tick():
        nonlocal calls
        calls += 1

    def reward(completions, **_):
        tick()
        return [float("a" in text or "7" in text) for text in completions]

    return reward


class WithAttributes:
    """A reward that is an object, writes its attributes by name, and has one that a callback writes."""

    __name__ = "with_attributes"
    step = 0

    def __call__(self, completions, **_):
        setattr(self, "calls", getattr(self, "calls", 0) + 1)  # noqa: B010
        return [float("a" in text or "7" in text) for text in completions]


def takes_a_step(session):
    session.trainer.reward_funcs[0].step += 1


def partial_reward():
    return functools.update_wrapper(functools.partial(with_a_helper_that_counts, most=4), with_a_helper_that_counts)


@pytest.mark.parametrize(
    "made", [lambda: with_a_helper_that_counts, with_a_closure_that_counts, WithAttributes, partial_reward]
)
@pytest.mark.generates
def test_what_a_reward_functions_variables_and_attributes_hold_is_no_part_of_the_rule(tmp_path, made):
    rewards = made()
    at = dict.fromkeys(range(1, 6), takes_a_step) if made is WithAttributes else {}
    run = train(tmp_path, rewards=rewards, at=at, max_steps=6, **CHOSEN)
    assert run.reasons[LEFT] == 0
    assert run.counters["replaced"] > 0


def give(*rewards, weights):
    """Puts other reward functions in the place of a trainer's."""

    def change(session):
        trainer = session.trainer
        trainer.reward_funcs = list(rewards)
        trainer.reward_func_names = [one.__name__ for one in rewards]
        trainer.reward_processing_classes = [None] * len(rewards)
        trainer.reward_weights = torch.tensor(weights)

    return change


def a(completions, **_):
    return [float("a" in text) for text in completions]


def b(completions, **_):
    return [float("b" in text) for text in completions]


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [([a], [b], None), ([a], [a, b], None), ([a, b], [b], None), ([a, b], [b], "b"), ([a, b], [b, a], "b")],
)
def test_reward_functions_replaced_within_a_run_count_by_name(tmp_path, before, after, counts):
    """Scripted, so that each function's rewards differ from the other's; mixed groups have advantages by hand."""
    script = {"a": FIRST, "b": SECOND}
    made = {name: Rewards(*(script[name] * 5), name=name) for name in script}
    weights = [1.0, 0.5]
    change = give(*(made[one.__name__] for one in after), weights=weights[: len(after)])
    run = train(
        tmp_path, rewards=[made[one.__name__] for one in before], at={2: change}, max_steps=8, scale_rewards="none",
        reward_weights=weights[: len(before)], replay_reward=counts,
    )  # fmt: skip
    table = run.table
    assert run.reasons[LEFT] > 0
    assert len(table) > 0
    assert (table.update >= 2).all()
    assert table.row_rewards.shape[2] == len(after)
    totals = (table.row_rewards * np.array(weights[: len(after)])).sum(axis=2)
    np.testing.assert_allclose(table.row_advantage, totals - totals.mean(axis=1, keepdims=True), atol=1e-5)
    assert table.counting == ([one.__name__ for one in after].index(counts) if counts else None)
    assert run.counters["replaced"] > 0


def test_a_function_that_counts_and_is_gone_ends_training(tmp_path):
    made = functions()
    with pytest.raises(ReplayError, match=r"replay_reward='accuracy' names none of this trainer's reward functions"):
        train(tmp_path, rewards=made, at={2: give(made[0], weights=[1.0])}, max_steps=4, replay_reward="accuracy")


def test_what_a_success_is_has_to_be_seen_anew_under_another_rule(tmp_path):
    """Rewards of 0 and 1, then of 0 and 2: by the old values the higher one would not be known."""

    def double(session):
        session.trainer.reward_weights.fill_(2.0)

    run = train(tmp_path, *[[LIVE, DEAD, HALF]] * 5, at={3: double}, max_steps=5, replay_retire_passes=4)
    success = run.session.components.success
    assert success.values == [0.0, 2.0]
    assert success.least == 1.0


def test_groups_are_stored_again_after_a_run_went_back_to_a_checkpoint_of_another_rule(tmp_path):
    change = {3: weigh(3.0)}
    saves = {"save_strategy": "steps", "save_steps": 2}
    run = train(tmp_path, *[[LIVE, HALF, DEAD]] * 4, at=change, max_steps=4, **saves)
    trainer = run.trainer
    trainer.reward_weights.fill_(1.0)
    trainer.args.max_steps = 6
    before = run.reasons[f"a group was refused: {OTHER_RULE}"]
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.reasons[f"a group was refused: {OTHER_RULE}"] == before
    assert (run.table.update >= 3).any()


ADDED = [{"prompt": "1=", "completion": text, "reward": float(index)} for index, text in enumerate("abcd")]


def test_groups_added_in_the_callback_that_changes_the_rule_stay(tmp_path):
    """The last batch's groups, which wait, are refused all the same."""

    def change(session):
        weigh(2.0)(session)
        assert session.add(ADDED) == 1

    run = train(tmp_path, [LIVE, HALF, DEAD], [LIVE] * 3, at={2: change}, max_steps=3, replaced=0)
    assert run.reasons[LEFT] == 2
    assert run.reasons[f"a group was refused: {OTHER_RULE}"] == 3
    assert (run.table.origin > 0).sum() == 1
    assert (run.table.update[run.table.origin == 0] >= 2).all()


def test_a_checkpoint_holds_no_groups_of_the_last_batch_that_are_of_another_rule(tmp_path):
    def change(session):
        weigh(2.0)(session)
        session.add(ADDED)

    train(tmp_path / "a", [LIVE] * 3, at={2: change}, replaced=0, **SAVES)
    state = saved.read(tmp_path / "a" / "checkpoint-2" / "trl_replay", 0)
    assert state.columns["origin"].tolist() == [2]


def second_run(folder, rewards, file, **settings):
    """Eight updates on a file; whether each further iteration drew groups."""
    trainer = make_trainer(folder, rewards, **{"max_steps": 8, "num_iterations": 8, **settings})
    given = {"replay_warm_start": str(file)} if file else {}
    session = trl_replay.attach(trainer, replay_preset="second_run", **given)
    drawn = []
    iterate = session.step.iterate

    def iterated(template):
        batch = iterate(template)
        drawn.append(batch is not None)
        return batch

    session.step.iterate = iterated
    return trainer, session, drawn


NAMED = [
    {"prompt": prompt, "completion": text, "reward/a": float("a" in text), "reward/b": float("b" in text)}
    for prompt in ("1=", "12=", "123+4=", "3=")
    for text in ("ac", "cc", "dd", "bb")
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "first.jsonl"
    path.write_text("\n".join(map(json.dumps, NAMED)))
    return path


def test_a_plugin_that_shapes_advantages_shapes_a_files_groups_before_and_after_a_change(tmp_path, file):
    def doubled(groups):
        return groups.advantages * 2

    found = []

    def look(session):
        found.append(session.buffer.table.row_advantage[session.buffer.table.origin > 0])

    def change(session):
        look(session)
        weigh(0.0, 1.0)(session)
        assert session.add(str(file)) == 4

    train(
        tmp_path, rewards=[a, b], hooks={"advantages": doubled}, at={1: change, 3: look}, max_steps=4,
        reward_weights=[1.0, 0.0], scale_rewards="none", replay_warm_start=str(file),
        replay_selector="always(share=0.4)", replay_record="forward",
    )  # fmt: skip
    before, after = ([1.5, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.5, 1.5])
    assert found[0].tolist() == [before] * 4
    assert found[1].tolist() == [after] * 4


def test_a_second_run_resumed_under_another_rule_takes_its_file_again(tmp_path, file):
    saves = {"save_strategy": "steps", "save_steps": 4}
    second_run(tmp_path / "a", [a, b], file, reward_weights=[1.0, 0.0], **saves)[0].train()
    trainer, session, drawn = second_run(tmp_path / "b", [b], file)

    class Adds(TrainerCallback):
        def on_train_begin(self, *given, **named):
            assert session.add(str(file)) == 4

    trainer.add_callback(Adds())
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert len(drawn) == 3, "one batch is generated on resuming"
    assert all(drawn)
    table = session.buffer.table
    assert (table.row_advantage[table.origin > 0].argmax(axis=1) == 3).all()


def test_a_second_run_whose_groups_have_left_is_refused(tmp_path, file):
    trainer, session, _ = second_run(tmp_path, [a, b], file, reward_weights=[1.0, 0.0])
    trainer.add_callback(Act({3: lambda: weigh(0.0, 1.0)(session)}))
    with pytest.raises(ReplayError, match=r"generates no further batch.* Call session\.add\(.* on_train_begin where"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_153_clear_from_a_callback_leaves_nothing_of_before(tmp_path):
    found = []

    def clear(session):
        session.clear()
        found.append(session.components.success.values)

    table = train(tmp_path, rewards=functions(), at={2: clear}).table
    assert len(table) > 0
    assert (table.update >= 2).all()
    assert found == [[]], "what a success is has to be seen anew"
