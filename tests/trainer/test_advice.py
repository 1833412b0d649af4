"""Advice: five kinds of runs, each trained for real, and what `explain()` and the report say to change."""

import itertools
import re
import warnings

import numpy as np
import pytest
from advised import outcome_of, rules_in, said_of, told_of
from support import DEAD, HALF, LIVE, Rewards, logged
from trl_replay_papers import METHODS

import trl_replay
from trl_replay.extras.outcome.outcome import Outcome
from trl_replay.extras.outcome.rules import RULES, advise, holds
from trl_replay.extras.outcome.run import Run
from trl_replay.testing import make_trainer

RIGHT = [1.0, 1.0, 1.0, 1.0]
STEPS = 12
LEARNS = pytest.mark.generates
FULL = [[HALF, LIVE, LIVE]] * 3
"""Batches that fill the buffer."""
MOSTLY_DEAD = [[DEAD, DEAD, LIVE]]

NARROW = {"replay_correction": "sequence_mask(low=0.99, high=1.01)"}

RUNS = {
    "all wrong": ([[DEAD] * 3], {}, {}, {"nothing live"}),
    "no buffer": ([[DEAD] * 3], {}, {"replay_buffer_size": 0, "replay_refill": "new(rounds=1)"}, {"nothing live"}),
    "all right": ([*FULL, [RIGHT] * 3], {"learning_rate": 1e-4}, {}, {"all right"}),
    "dense": ([[LIVE, HALF, LIVE]], {}, {}, set()),
    "stale": ([*FULL, *MOSTLY_DEAD], {"learning_rate": 0.2}, {}, {"stale buffer"}),
    "masked": ([*FULL, *MOSTLY_DEAD], {"learning_rate": 5e-3}, NARROW, {"masked rows"}),
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """A kind of run: its name, its folder with a checkpoint, and what its session explains."""
    script, training, settings, _ = RUNS[request.param]
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(
        folder, Rewards(*script), max_steps=STEPS, save_strategy="steps", save_steps=STEPS, **training
    )
    session = trl_replay.attach(trainer, replay_start=0, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Of the rows replayed")  # its own test is below
        trainer.train()
    return request.param, folder, session.explain()


def numbers(prompts, trainer):
    """Completions that nobody has to generate, where rewards do not depend on them."""
    tokenizer, first = trainer.processing_class, 100 + len(prompts) * trainer.state.global_step
    completions = [[*tokenizer(str(first + row))["input_ids"], tokenizer.eos_token_id] for row in range(len(prompts))]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(ids) for ids in completions],
    }


def trained(folder, rewards, *prompts, **settings):
    """A trainer and its session after training; what is generated does not matter to scripted rewards."""
    replay = {name: settings.pop(name) for name in list(settings) if "replay_" in name}
    trainer = make_trainer(folder, rewards, *prompts, **settings)
    if isinstance(rewards, Rewards):
        trainer.rollout_func = numbers
    session = trl_replay.attach(trainer, **replay)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer, session


def as_stock(trainer):
    """The log of a dry run without what replay logs: that of a run without replay."""
    return [
        {key: value for key, value in entry.items() if not key.startswith("replay/")}
        for entry in trainer.state.log_history
    ]


def test_a_strategy_or_plugin_counts_by_its_name_whatever_its_arguments():
    given = {"replay_correction": "topr(cap=2.0)", "replay_plugins": ["greso", "skip_solved(groups=2)"]}
    assert holds("replay_correction is topr", given)
    assert holds("replay_plugins is skip_solved", given)
    assert not holds("replay_correction is not none or topr", given)


def test_explain_begins_with_the_outcome_and_ends_with_what_to_change(run):
    name, _, told = run
    first, *_ = told.splitlines()
    assert re.fullmatch(
        r"outcome: reward [\d.]+ → [\d.]+ over (144|288) completions, 12 updates, \d+ seconds "
        r"\(means of the first and last 4 of 12 logged steps\)", first
    )  # fmt: skip
    advice = told.partition("what to change: ")[2]
    assert rules_in(advice) == RUNS[name][3], told
    assert RUNS[name][3] or advice.startswith(("nothing", "no rule names a fault"))


def test_the_report_of_its_folder_tells_the_same_outcome_and_the_same_advice(run, said):
    name, folder, told = run
    printed = " ".join(said("report", folder).split())
    assert told.splitlines()[0] in printed
    assert printed.endswith(" ".join(told[told.index("what to change") :].split()))
    assert bool(re.search(r"docs/[a-z/-]*\.md#[a-z0-9-]+", printed)) == bool(RUNS[name][3])


def test_slots_count_as_filled_only_where_few_dead_groups_remain(tmp_path):
    rewards = Rewards([DEAD, DEAD, LIVE], [DEAD] * 3)
    _, session = trained(tmp_path, rewards, max_steps=STEPS, learning_rate=1e-4, replay_start=0)
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(1 / 3), "one entry for three slots"
    assert rules_in(session.explain()) == set()


def test_a_setting_that_masks_everything_warns_once_with_its_value_and_the_remedy(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*FULL, *FULL, *MOSTLY_DEAD), max_steps=26, learning_rate=2e-2)
    session = trl_replay.attach(trainer, replay_start=0, **NARROW)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (told,) = [str(warning.message) for warning in caught if "masked" in str(warning.message)]
    words = r"replay_correction='sequence_mask' \(low=0.99, high=1.01\)\. .*replay_correction=\"sequence_mask\""
    assert re.match(r"Of the rows replayed in 8 updates, (9\d|100)% were masked.*" + words, told)
    assert session.metrics["replay/gated_fraction"] > 0.5


@pytest.mark.parametrize("settings", [{}, {"replay_correction": "sequence_mask"}])
def test_no_warning_where_something_is_left_or_nothing_was_meant_to_be(tmp_path, settings):
    """Warnings are errors here."""
    trainer = make_trainer(tmp_path, Rewards(*FULL, *MOSTLY_DEAD), max_steps=14, learning_rate=1e-4)
    trl_replay.attach(trainer, replay_start=0, **settings)
    trainer.train()


def test_imitation_leaves_failures_out_by_intent(tmp_path):
    """Of 24 rows one trains, which is neither a warning nor advice to take another correction."""
    one = [1.0] + [0.0] * 23
    rewards = Rewards(*[[one]] * 3, *[[[0.0] * 24], [one]] * 9)
    settings = {"num_generations": 24, "per_device_train_batch_size": 24, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, rewards, max_steps=21, **settings)
    session = trl_replay.attach(trainer, replay_start=0, replay_correction="imitation")
    trainer.train()
    assert session.totals.counters["replaced"] == 9, "more updates than it takes for a warning, which would raise"
    assert logged(trainer, "replay/gated_fraction")[-1] == pytest.approx(23 / 24)
    assert rules_in(session.explain()).isdisjoint({"masked rows", "stale buffer"})


def says(*characters):
    """Accuracy that pays 1 for one of these characters."""

    def accuracy(completions, **_):
        return [float(any(one in text for one in characters)) for text in completions]

    return accuracy


def constant(value):
    def fixed(completions, **_):
        return [value] * len(completions)

    return fixed


def spread(completions, **_):
    """A length term that hardly ever is equal over a group."""
    return [len(set(text)) + sum(map(ord, text)) / 1e4 for text in completions]


def begins(completions, **_):
    return [float(text.startswith("7")) for text in completions]


def units(low, high):
    """Letters anywhere, in other units: nearly every completion has one."""

    def letters(completions, **_):
        return [high if any(one.isalpha() for one in text) else low for text in completions]

    return letters


def three_digits(completions, **_):
    return [float(len({one for one in text if one.isdigit()}) == 3) for text in completions]


SUMS = [f"{one}+{other}=" for one in range(6) for other in range(6)]


@LEARNS
def test_a_collapse_is_said_once_while_it_happens_with_the_checkpoint_to_go_back_to(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    trainer = make_trainer(tmp_path, three_digits, SUMS, max_steps=40, learning_rate=0.1, **saving)
    session = trl_replay.attach(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (told,) = [str(one.message) for one in caught if "The policy has collapsed" in str(one.message)]
    healthy, checkpoint = map(int, re.findall(r"since step (\d+):.*go back to checkpoint-(\d+),", told)[0])
    assert checkpoint == healthy // 4 * 4
    (last,) = [entry for entry in trainer.state.log_history if entry["step"] == healthy and "reward" in entry]
    assert last["replay/all_wrong_fraction"] < 0.95
    assert "collapse" in rules_in(session.explain())


@LEARNS
def test_a_stock_run_that_collapsed_is_told_so_and_nothing_else(tmp_path):
    trainer = make_trainer(tmp_path, three_digits, SUMS, max_steps=40, learning_rate=0.1)
    trainer.train()
    assert told_of(trainer.state.log_history) == ["collapse"]


SOLVED, SEVEN = units(0.0, 1.0), says("7")
FAST = {"learning_rate": 2e-3}
SLOW = {"learning_rate": 1e-4}
MASKED = {"mask_truncated_completions": True, "max_completion_length": 4, **SLOW}
DISEASES = {
    "nothing is ever right": (says("zzz"), {}, {}, {"nothing live"}),
    "nearly all is right": (SOLVED, SLOW, {}, {"all right"}),
    "solved at a high rate": (SEVEN, {"learning_rate": 0.1, "max_steps": 80}, {}, {"all right"}),
    "a sum that always differs": ([constant(1.0), spread, begins], SLOW, {}, {"dead function"}),
    "a function that never pays": ([spread, says("zzz")], SLOW, {}, {"silent function"}),
    "the same with the name": (
        [constant(1.0), spread, begins], SLOW, {"replay_reward": "begins"}, set()),
    "format alone": ([constant(1.0), says("zzz")], {}, {}, {"nothing live"}),
    "a success for each unit": (units(-1.0, 0.0), SLOW, {}, {"all right"}),
    "a weight of 0.3": (SOLVED, {"reward_weights": [0.3], **SLOW}, {}, {"all right"}),
    "an offset of 1": (units(1.0, 2.0), SLOW, {}, {"all right"}),
    "a constant of 0.4": (constant(0.4), {}, {}, {"nothing live"}),
    "all rewards None": (constant(None), {}, {}, {"no reward"}),
    "cut off and masked": (SEVEN, MASKED, {}, {"truncation"}),
    "everything of it set already": (
        SOLVED, SLOW, {"replay_retire_passes": 4, "replay_refill": "new(rounds=1)"}, {"all right"}),
    "a teacher's grade": (spread, SLOW, {}, set()),
}  # fmt: skip


@pytest.mark.parametrize("format_too", [False, True])
def test_170_a_function_that_alone_scores_its_groups_is_dead_where_their_sum_is(tmp_path, format_too):
    """Of three groups one is maths, and dead later; a third function that varies makes it live."""
    batches = itertools.count()

    def of(first):
        def routed(completions, **_):
            maths = DEAD if first and next(batches) >= 6 else LIVE
            return [*maths, *[None] * 8] if first else [*[None] * 4, *LIVE, *LIVE]

        routed.__name__ = "maths" if first else "code"
        return routed

    functions = [of(True), of(False), *([spread] if format_too else [])]
    trainer, session = trained(tmp_path, functions, max_steps=12, learning_rate=1e-4)
    assert logged(trainer, "replay/dead_fraction/maths") == [*[0.0] * 6, *[1.0] * 6]
    assert logged(trainer, "replay/live_without/maths") == [1.0] * 6 * format_too
    assert logged(trainer, "replay/dead_fraction/code") == [0.0] * 12
    assert logged(trainer, "replay/live_without/code") == []
    assert ("dead function" in rules_in(session.explain())) == format_too


@pytest.mark.parametrize(
    "disease", [pytest.param(name, marks=LEARNS if "high rate" in name else ()) for name in DISEASES]
)
def test_each_disease_gets_its_advice_and_no_other(tmp_path, disease):
    rewards, training, settings, expected = DISEASES[disease]
    _, session = trained(tmp_path, rewards, SUMS, **{"max_steps": 24, **training}, **settings)
    told = session.explain()  # while there is its trainer
    assert rules_in(told) == expected, told
    advice = told.partition("what to change")[2]
    for name, value in settings.items():
        assert f"{name}={value!r}" not in advice
        assert f"{name} to" not in advice


@pytest.mark.parametrize(
    ("begins", "ends", "expected"),
    [
        ([DEAD] * 3, [DEAD] * 3, {"nothing live"}),
        ([LIVE] * 3, [RIGHT] * 3, {"all right"}),  # something to store there was
        ([LIVE] * 3, [DEAD] * 3, {"stuck"}),
        ([DEAD] * 3, [LIVE, DEAD, DEAD], {"dead groups"}),
    ],
    ids=["never live", "solved", "live once", "live now"],
)
def test_a_stock_run_is_told_what_replay_can_do_by_its_whole_log(tmp_path, begins, ends, expected):
    trainer = make_trainer(tmp_path, Rewards(*[begins] * 12, *[ends] * 12), max_steps=24)
    trainer.rollout_func = numbers
    trainer.train()
    assert set(told_of(trainer.state.log_history)) == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [([DEAD] * 3, {"fallen reward"}), ([DEAD, DEAD, LIVE], {"fallen reward", "dead groups"}), ([RIGHT] * 3, set())],
    ids=["to nothing", "below half", "solved"],
)
def test_a_run_whose_reward_fell_is_told_to_lower_its_rate_before_replay(tmp_path, ends, expected):
    rewards = Rewards(*[[LIVE] * 3] * 20, *[ends] * 20)
    trainer, _ = trained(tmp_path, rewards, max_steps=40, replay_dry_run=True)
    for log in (trainer.state.log_history, as_stock(trainer)):
        told = told_of(log)
        assert set(told) - {"all right"} == expected
        assert not expected or told[0] == "fallen reward"


MOSTLY_RIGHT = [*[[RIGHT] * 3] * 3, [RIGHT, RIGHT, DEAD]]
MOSTLY_WRONG = [*[[DEAD] * 3] * 3, [DEAD, DEAD, RIGHT]]
"""Four batches, which one entry of a log averages: it does not show that rewards are 0 and 1."""


@pytest.mark.parametrize(
    ("ends", "expected"), [(MOSTLY_RIGHT, "all right"), (MOSTLY_WRONG, "stuck")], ids=["solved", "failing"]
)
@pytest.mark.parametrize("functions", [1, 2])
def test_a_dry_run_tells_failures_from_successes_in_a_log_that_averages_and_a_stock_log_says_that_it_does_not(
    tmp_path, ends, expected, functions
):
    rewards = Rewards(*[[LIVE] * 3, [HALF] * 3] * 4, *ends * 8)
    several = rewards if functions == 1 else [rewards, constant(0.0)]
    trainer, _ = trained(tmp_path, several, max_steps=40, logging_steps=4, replay_dry_run=True)
    assert told_of(trainer.state.log_history) == [expected], "the log alone tells that it was one"
    assert told_of(as_stock(trainer)) == ["dead, right or wrong"]


def test_a_reward_that_fell_is_told_of_a_log_that_averages(tmp_path):
    script = [*[[LIVE] * 3, [HALF] * 3] * 20, *[[DEAD] * 3, [DEAD, DEAD, HALF]] * 20]
    trainer, _ = trained(tmp_path, Rewards(*script), max_steps=80, logging_steps=2, replay_dry_run=True)
    assert told_of(as_stock(trainer))[0] == "fallen reward"


def test_a_mean_reward_below_zero_fell_by_its_share_of_the_way_from_its_lowest_to_its_best(tmp_path):
    mixed, lost = [1.0, 1.0, -1.0, 1.0], [-1.0] * 4
    rewards = Rewards(*[[mixed] * 3] * 20, *[[mixed, lost, lost]] * 20)
    trainer, _ = trained(tmp_path, rewards, max_steps=40, replay_dry_run=True)
    assert told_of(as_stock(trainer)) == ["fallen reward", "dead groups"]


def test_a_dry_run_is_told_what_a_stock_run_is_told(tmp_path):
    rewards = Rewards(*[[LIVE] * 3] * 12, *[[DEAD] * 3] * 12)
    _, session = trained(tmp_path, rewards, max_steps=24, replay_dry_run=True)
    told = session.explain()
    assert rules_in(told) == {"stuck"}
    assert "Set replay_dry_run" not in told


def test_a_stock_log_without_rewards_is_not_told_that_replay_could_fill_its_dead_groups(tmp_path):
    def sometimes(completions, **_):
        return [float(text < "5") if sum(map(ord, text)) % 7 == 0 else None for text in completions]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(tmp_path, sometimes, max_steps=12)
        trainer.train()
    found = told_of(trainer.state.log_history)
    assert "steps without a reward" in found
    assert "dead groups" not in found


ONE_OF_THREE = {"learning_rate": 1e-5, "replay_start": 0}


def test_a_limit_that_halves_replay_is_named_with_what_it_cost(tmp_path):
    """Two of three groups are dead: the one that was stored last fills one slot, those that were too old a second."""
    rewards = [[LIVE, LIVE, LIVE], *[[DEAD, DEAD, LIVE]] * 39]
    _, session = trained(tmp_path, Rewards(*rewards), max_steps=40, replay_max_age=1, **ONE_OF_THREE)
    lines = session.explain().splitlines()
    assert "  38 x replay_max_age left a slot as it was that a stored group could have filled" in lines
    assert lines[-1].startswith(
        "what to change: A limit holds replay back: raise replay_max_age, or leave it out. "
        "(replay_max_age=1 left 38 of 78 slots that could have been filled"
    )
    _, session = trained(tmp_path, Rewards(*rewards), max_steps=40, **ONE_OF_THREE)
    assert session.explain().splitlines()[-1].startswith("what to change: no rule names a fault")


@pytest.mark.parametrize(
    ("settings", "limit", "left"),
    [({"replay_max_uses": 1}, "replay_max_uses", 17), ({"replay_max_fraction": 0.34}, "replay_max_fraction", 19)],
)
def test_other_limits_are_counted_alike(tmp_path, settings, limit, left):
    rewards = Rewards([LIVE, LIVE, LIVE], *[[DEAD, DEAD, LIVE]] * 19)
    _, session = trained(tmp_path, rewards, max_steps=20, **ONE_OF_THREE, **settings)
    told = session.explain()  # while there is its trainer
    assert f"  {left} x {limit} left a slot as it was" in told
    assert f"raise {limit}" in told


def test_a_limit_that_cost_nothing_is_not_named(tmp_path):
    rewards = Rewards([LIVE, LIVE, LIVE], [DEAD, LIVE, LIVE])
    _, session = trained(tmp_path, rewards, max_steps=12, replay_max_age=2, **ONE_OF_THREE)
    assert "replay_max_age" not in session.explain()


@pytest.mark.parametrize("preset", ["sample_efficient", *METHODS])
def test_a_run_with_a_preset_is_sold_no_other_settings(preset):
    """By a log that shows whatever any rule goes by."""
    seen = {"replay/dead_fraction": 0.6, "replay/dead_fraction_after": 0.5, "replay/size": 16.0, "replay/ess": 0.3,
            "replay/replaced_fraction": 0.3, "replay/all_wrong_fraction": 0.6, "replay/stored": 4.0,
            "replay/evicted": 4.0, "replay/drift_mean": 2.0, "replay/ratio_mean": 0.5}  # fmt: skip
    log = [{"step": step, "frac_reward_zero_std": 0.6, "reward": 0.2, **seen} for step in range(1, 41)]
    settings = trl_replay.ReplayConfig(replay_preset=preset).with_preset().to_dict()
    assert settings["replay_preset"] == preset
    run = Run.of_log(log, settings={**settings, "replay_max_age": 1}, held_back={"replay_max_age": 9}, replaced=9)
    assert not [each.change for each in advise(Outcome.of(run)) if "replay_" in each.change]


def test_no_rule_cites_a_task_or_a_number_of_it_and_no_healthy_run_is_sold_a_preset():
    """Readers have not been shown our tasks, and most have larger models."""
    for rule in RULES:
        assert not re.search(r"lock|vault|grades|addition|topics|french|\d\.\d\d", rule.told({})), rule.name
    assert [rule.name for rule in RULES if "preset" in rule.told({})] == ["stuck", "dead groups"]


def test_the_outcome_and_a_fall_go_by_the_reward_that_counts(tmp_path):
    """Accuracy falls to nothing while length makes up for it."""
    right = Rewards(*[[HALF] * 3] * 20, *[[DEAD] * 3] * 20)
    long = Rewards(*[[[0.0, 0.1, 0.2, 0.3]] * 3] * 20, *[[[0.6, 0.7, 0.8, 0.9]] * 3] * 20)
    right.__name__, long.__name__ = "accuracy", "length"
    trainer, session = trained(tmp_path, [right, long], max_steps=40, replay_reward="accuracy", replay_dry_run=True)
    lines = session.explain().splitlines()
    assert lines[0].startswith("outcome: accuracy 0.5 → 0 over 480 completions, 40 updates")
    assert "The mean reward fell below half of its best" in lines[-1]
    assert str(outcome_of(trainer.state.log_history)).startswith("accuracy 0.5 → 0"), "the log alone names it"
    plain = [{key: value for key, value in entry.items() if "judged_by" not in key} for entry in
             trainer.state.log_history]  # fmt: skip
    assert str(outcome_of(plain)).startswith("reward 0.65 → 0.75 (accuracy 0.5 → 0; length 0.15 → 0.75) over")


def test_a_reward_that_fell_is_told_where_no_rule_names_a_fault():
    """Half of what a run that replay hurt logs: it rose, and slid back above where it began."""
    rewards = [0.1 + 0.008 * min(step, 50) - 0.004 * max(0, step - 50) for step in range(100)]
    log = [
        {"step": step, "reward": reward, "rewards/right/mean": reward, "frac_reward_zero_std": 0.1,
         "replay/dead_fraction": 0.1, "replay/dead_fraction_after": 0.0, "replay/replaced_fraction": 0.1}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    told = said_of(log)
    assert "the reward fell from 0.49 to 0.32: go back to a checkpoint from before, and try half the" in told
    told = said_of(log[:60])
    assert "fell" not in told


@pytest.mark.parametrize("seed", range(12))
def test_a_reward_that_only_wavers_did_not_fall(seed):
    """2 of 64 completions are right, whatever the step: means of 20 steps differ by half of themselves."""
    rewards = np.random.default_rng(seed).binomial(64, 0.03, 200) / 64
    log = [
        {"step": step, "reward": reward, "rewards/right/mean": reward, "frac_reward_zero_std": 0.8,
         "replay/dead_fraction": 0.8, "replay/dead_fraction_after": 0.1, "replay/replaced_fraction": 0.7}
        for step, reward in enumerate(rewards.tolist(), 1)
    ]  # fmt: skip
    assert "fell" not in said_of(log)


def test_a_clip_range_that_is_narrower_than_an_update_moves_is_named_with_one_that_is_not(tmp_path):
    """The range of GSPO's paper, which most replayed rows leave after one update."""
    narrow = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"}
    trainer, session = trained(tmp_path, three_digits, SUMS, max_steps=24, learning_rate=1e-3, **narrow)
    told = session.explain()
    assert "narrow clip" in rules_in(told)
    width = float(re.findall(r"Set epsilon and epsilon_high to ([0-9.e-]+) or more", told)[0])
    assert width > 10 * narrow["epsilon"]
    wide, _ = trained(
        tmp_path, three_digits, SUMS, max_steps=24, **{**narrow, "epsilon": width, "epsilon_high": width}
    )
    clipped = [logged(each, "replay/clip_ratio") for each in (trainer, wide)]
    assert min(sum(values) / len(values) for values in clipped) == sum(clipped[1]) / len(clipped[1])


def test_a_reward_that_pays_anything_is_told_so(tmp_path):
    """All but one completion in a hundred get the best of it."""
    rows = itertools.count()

    def anything(completions, **_):
        return [float(next(rows) % 100 != 7) for _ in completions]

    _, session = trained(tmp_path, anything, SUMS, max_steps=24)
    told = session.explain()
    assert "The function may pay anything".lower() in told.lower()
    assert "Score a nonsense text" in told
