"""Each curriculum against its rule by hand, and in a training that is resumed."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import trl_replay_curricula
from trl_replay_curricula import Bapo, Greso, SkipSolved

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.errors import RefusedError
from trl_replay.testing import InputsContract, PluginContract, make_inputs_context, make_prompts, make_trainer

SIZE = 4
SOLVED, FAILED = [1.0] * SIZE, [0.0] * SIZE


def prompts_table(*groups):
    """A table that has seen these groups of eight, `(key, passes, update)` each."""
    return make_prompts(*groups, size=8)


def rows(*numbers):
    return [{"number": number} for number in numbers]


def context(table, new=(), **overrides):
    """A plugin's context in a dataset of rows that are their own keys; `new` are its new prompts, in this order, and
    then 0."""
    overrides = {"num_generations": 8, "prompt_rows": lambda keys: rows(*keys), **overrides}
    given = rows(*new, *[0] * 64)
    return make_inputs_context(given, table, key=lambda row: row["number"], **overrides)


def asked(plugin, given, seen):
    """The numbers of the prompts that a plugin makes of the given ones."""
    made = plugin.trl_replay_inputs(rows(*given), seen)
    return list(given) if made is None else [row["number"] for row in made]


# skip_solved


def test_a_solved_prompt_makes_room_for_a_new_one():
    table = prompts_table((1, 8, 99), (2, 7, 99), (3, 0, 99))
    assert asked(SkipSolved(), [1, 2, 3, 4], context(table, new=[9])) == [9, 2, 3, 4]


def test_a_solved_prompt_is_asked_again_after_so_many_updates():
    table = prompts_table((1, 8, 81), (2, 8, 80))
    assert asked(SkipSolved(again_after=20), [1, 2], context(table, new=[9])) == [9, 2]


@pytest.mark.parametrize(("groups", "expected"), [(1, [8, 9]), (2, [8, 2]), (3, [1, 2])])
def test_so_many_groups_in_a_row_make_a_prompt_solved(groups, expected):
    table = prompts_table((1, 3, 97), (1, 8, 98), (1, 8, 99), (2, 3, 98), (2, 8, 99))
    assert asked(SkipSolved(groups=groups), [1, 2], context(table, new=[8, 9])) == expected


def test_a_lower_pass_rate_can_count_as_solved():
    table = prompts_table((1, 7, 99), (2, 6, 99))
    assert asked(SkipSolved(pass_rate=7 / 8), [1, 2], context(table, new=[9])) == [9, 2]


def test_new_prompts_must_not_be_solved_or_in_the_batch_either():
    table = prompts_table((1, 8, 99), (5, 8, 99))
    assert asked(SkipSolved(), [1, 2], context(table, new=[5, 2, 6])) == [6, 2]


def test_where_everything_is_solved_the_prompts_stay():
    table = prompts_table(*((key, 8, 99) for key in range(10)))
    assert asked(SkipSolved(), [1, 2], context(table, new=[3, 4, 5])) == [1, 2]


def test_where_nothing_is_solved_another_plugin_may_answer():
    assert SkipSolved().trl_replay_inputs(rows(1, 2), context(prompts_table((1, 7, 99)))) is None


# greso


@pytest.mark.parametrize(
    ("history", "chance"),
    [
        ([], 0),
        ([4], 0),
        ([8], 1 - 0.6),
        ([8, 8, 8], 1 - 0.6**3),
        ([0], 1 - 0.2),
        ([0, 0], 1 - 0.2**2),
        ([8, 8, 4], 0),
        ([0, 4, 0], 1 - 0.2),
        ([0] * 9, 1 - 0.01),  # 0.2⁹ is less than the least chance
    ],
)
def test_the_chance_to_be_passed_over_grows_with_the_dead_groups_in_a_row(history, chance):
    table = prompts_table(*((1, passes, update) for update, passes in enumerate(history)))
    assert Greso(easy=0.6, hard=0.2).skip_chance([1], table) == pytest.approx([chance])


def test_prompts_are_passed_over_with_that_chance():
    table = prompts_table(*((key, 8, 99) for key in range(2000)), *((key, 8, 99) for key in range(1000)))
    skipped = Greso().skipped(range(2000), context(table))
    assert skipped[:1000].mean() == pytest.approx(3 / 4, abs=0.04)
    assert skipped[1000:].mean() == pytest.approx(1 / 2, abs=0.05)


def test_two_processes_that_draw_alike_pass_over_alike():
    table = prompts_table(*((key, 8, 99) for key in range(8)))
    one, other = (asked(Greso(), range(8), context(table, new=range(20, 40), seed=3)) for _ in range(2))
    assert one == other != list(range(8))


@pytest.mark.parametrize(
    ("easy", "hard", "live", "moves"),
    [
        (1, 2, 9, (-0.01, -0.01)),  # 1/12 and 2/12: the aims, a third and two thirds of 1/4
        (0, 2, 9, (0.01, -0.01)),
        (1, 1, 9, (-0.01, 0.01)),
        (0, 0, 3, (0.01, 0.01)),
    ],
)
def test_each_chance_moves_towards_its_part_of_the_aim(easy, hard, live, moves):
    passes = [8] * easy + [0] * hard + [4] * live
    table = prompts_table((99, 8, 1), (99, 8, 2), *((key, count, 100) for key, count in enumerate(passes)))
    plugin = Greso()
    metrics = plugin.trl_replay_metrics(context(table))
    assert metrics == pytest.approx({"greso/p_easy": 0.5 + moves[0], "greso/p_hard": 0.5 + moves[1]})


def test_the_chances_stay_within_their_bounds():
    table = prompts_table((1, 8, 99), (1, 8, 100))
    plugin = Greso(easy=0.055, hard=0.945)
    for _ in range(3):
        metrics = plugin.trl_replay_metrics(context(table))
    assert metrics == pytest.approx({"greso/p_easy": 0.05, "greso/p_hard": 0.95})


def test_before_any_prompt_comes_again_the_chances_rest():
    table = prompts_table((1, 8, 100), (2, 0, 100))
    metrics = Greso().trl_replay_metrics(context(table))
    assert metrics == {"greso/p_easy": 0.5, "greso/p_hard": 0.5}


# bapo


def due(plugin, seen, done=1):
    """The plugin, after so many batches."""
    for _ in range(done):
        plugin.trl_replay_metrics(seen)
    return plugin


def test_hard_prompts_are_those_of_a_low_pass_rate_generated_for_last():
    table = prompts_table((1, 0, 10), (2, 1, 30), (3, 2, 40), (4, 8, 50), (5, 1, 20), (6, 0, 100))
    assert sorted(Bapo().hard(context(table))) == [1, 2, 5], "6 is of this batch"
    assert sorted(Bapo(kept=2).hard(context(table))) == [2, 5]
    assert sorted(Bapo(low=1 / 8).hard(context(table))) == [2, 5]
    assert sorted(Bapo(high=1 / 4).hard(context(table), present=[1])) == [2, 3, 5]


def test_hard_prompts_take_the_places_of_half_the_batch_in_every_second_batch():
    table = prompts_table(*((key, 0, 10) for key in range(50, 60)))
    seen = context(table)
    assert Bapo().trl_replay_inputs(rows(*range(8)), seen) is None
    assert due(Bapo(), seen, 2).trl_replay_inputs(rows(*range(8)), seen) is None
    made = asked(due(Bapo(), seen), range(8), seen)
    again = [number for number in made if number >= 50]
    assert len(again) == len(set(again)) == 4
    assert [place for place, number in enumerate(made) if number < 50] == [number for number in made if number < 50]


def test_with_nothing_hard_another_plugin_may_answer():
    seen = context(prompts_table((1, 8, 10)))
    assert due(Bapo(), seen).trl_replay_inputs(rows(1, 2), seen) is None


def test_no_more_than_so_many_are_tried_again_at_once():
    table = prompts_table(*((key, 0, 10) for key in range(100, 200)))
    made = asked(due(Bapo(), context(table)), range(80), context(table))
    assert sum(number >= 100 for number in made) == 32


def test_a_group_asked_about_alone_is_tried_again_with_the_chance_of_its_share():
    table = prompts_table((50, 0, 10))
    plugin = due(Bapo(fraction=0.25), context(table))
    counts = Counter(asked(plugin, [1], context(table, seed=seed))[0] for seed in range(1000))
    assert counts[50] == pytest.approx(250, abs=45)


def test_with_further_rounds_they_are_tried_in_the_first_one(tmp_path):
    trainer = make_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions))
    session = trl_replay.attach(trainer, replay_plugins=["bapo"], replay_refill="new(rounds=2)", replay_buffer_size=0)
    for key in (50, 51):
        session.prompts.note(np.array([key]), np.array([key]), np.zeros((1, 8), bool), np.array([True]), 10)
    plugin = trl_replay_curricula.bapo
    seen = context(session.prompts)
    plugin.trl_replay_metrics(seen)
    assert plugin.trl_replay_inputs(rows(1, 2, 3), seen) is None
    made = asked(plugin, [1, 2, 3], context(session.prompts, round=1))
    assert len({50, 51} & set(made)) == 2
    assert len({1, 2, 3} & set(made)) == 1, "the third keeps its new prompt"
    assert plugin.trl_replay_inputs(rows(1), context(session.prompts, round=2)) is None


# arguments


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        (SkipSolved, "pass_rate", 1.5),
        (SkipSolved, "again_after", 0),
        (SkipSolved, "groups", True),
        (Greso, "target", -0.1),
        (Greso, "easy", float("nan")),
        (Bapo, "high", "low"),
        (Bapo, "low", 0.5),  # above `high`
        (Bapo, "every", 0),
        (Bapo, "at_once", 1.5),
    ],
)
def test_an_argument_that_can_not_be_used_is_named(make, argument, value):
    with pytest.raises(ConfigurationError, match=rf"{make.__name__}: {argument}="):
        make(**{argument: value})


def test_the_entry_points_lead_to_the_plugins():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["trl_replay"]
    assert points == {name: f"trl_replay_curricula:{name}" for name in ("skip_solved", "greso", "bapo")}
    assert all(hasattr(trl_replay_curricula, name) for name in points)


# in training


PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(2)]


class Judge:
    """A reward function that goes by the prompt: what begins with 0 to 3 is solved, with 4 to 6 failed, else live."""

    def __init__(self):
        self.asked = []
        self.__name__ = "judge"

    def __call__(self, completions, prompts, **_):
        self.asked.append([str(prompt) for prompt in prompts[::SIZE]])
        return [reward for prompt in self.asked[-1] for reward in self.of(prompt)]

    def of(self, prompt):
        if prompt[0] in "0123":
            return SOLVED
        return FAILED if prompt[0] in "456" else [1.0, 0.0, 1.0, 0.0]


def train(folder, resume=None, judge=None, shuffle=False, **settings):
    """Trains 10 updates, with a checkpoint after 7 of them; what was asked for, and the session."""
    judge = judge or Judge()
    arguments = {"max_steps": 10, "max_completion_length": 2, "gradient_checkpointing": False}
    saving = {"save_strategy": "steps", "save_steps": 7}
    trainer = make_trainer(folder, judge, PROMPTS, shuffle_dataset=shuffle, **saving, **arguments)
    session = trl_replay.attach(trainer, replay_buffer_size=0, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return judge.asked, session


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("skip_solved", {}),
        ("greso", {"replay_refill": "new(rounds=1)"}),
        ("bapo", {}),
        ("bapo", {"replay_refill": "new(rounds=1)"}),
    ],
)
def test_a_resumed_run_goes_on_as_the_run_that_was_not_interrupted(tmp_path, name, settings):
    folder = tmp_path / "run"
    asked_whole, whole = train(folder, replay_plugins=[name], **settings)
    asked_then, resumed = train(folder, str(folder / "checkpoint-7"), replay_plugins=[name], **settings)
    assert resumed.plugins == [name]
    assert asked_then == asked_whole[-len(asked_then) :]
    for column, values in whole.prompts.state_dict().items():
        np.testing.assert_array_equal(resumed.prompts.state_dict()[column], values)
    plugin = getattr(trl_replay_curricula, name)
    if name != "skip_solved":
        assert plugin.state(resumed.prompts) == plugin.state(whole.prompts) != plugin.first_state()
    if name == "greso":
        assert whole.metrics["greso/p_easy"] == plugin.state(whole.prompts).easy


def test_in_training_no_solved_prompt_is_asked_twice(tmp_path):
    asked_for, _ = train(tmp_path, replay_plugins=["skip_solved"], replay_pass_reward=1.0)
    counts = Counter(prompt for batch in asked_for for prompt in batch)
    assert max(count for prompt, count in counts.items() if prompt[0] in "0123") == 1
    assert max(counts.values()) > 1
    assert all(len(set(batch)) == 3 for batch in asked_for)


def test_in_training_hard_prompts_take_the_slots_of_dead_groups(tmp_path):
    """Every group is dead but that of a prompt which is tried once more."""
    judge = Judge()
    judge.of = lambda prompt: [float(sum(prompt in batch for batch in judge.asked) > 1), 0.0, 0.0, 0.0]
    settings = {"replay_plugins": ["bapo"], "replay_refill": "new(rounds=1)", "replay_pass_reward": 1.0}
    _, session = train(tmp_path, judge=judge, shuffle=True, **settings)
    assert session.totals.counters["refilled"] >= 6, "most slots of every second batch, once there is something to try"


def test_two_sessions_of_a_process_have_states_of_their_own(tmp_path):
    trainers = [make_trainer(tmp_path, Judge(), PROMPTS) for _ in range(2)]
    one, other = (trl_replay.attach(trainer, replay_plugins=["greso"], replay_buffer_size=0) for trainer in trainers)
    trl_replay_curricula.greso.state(one.prompts).easy = 0.1
    assert trl_replay_curricula.greso.state(other.prompts).easy == 0.5


@pytest.mark.parametrize("name", ["skip_solved", "greso"])
def test_a_stream_stops_what_needs_new_prompts_before_training(tmp_path, name):
    trainer = make_trainer(tmp_path, Judge(), PROMPTS)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(RefusedError, match=r"puts new prompts .* stream"):
        trl_replay.attach(trainer, replay_plugins=[name], replay_buffer_size=0)


def test_a_dry_run_changes_no_prompts(tmp_path):
    judge = Judge()
    trainer = make_trainer(tmp_path, judge, PROMPTS)
    trl_replay.attach(trainer, replay_plugins=["greso", "bapo", "skip_solved"], replay_dry_run=True)
    trainer.train()
    assert judge.asked == [PROMPTS[3 * batch : 3 * batch + 3] for batch in range(4)]


class TestGreso(InputsContract, PluginContract):
    plugin = Greso
    settings = {"replay_refill": "new(rounds=1)"}  # noqa: RUF012
