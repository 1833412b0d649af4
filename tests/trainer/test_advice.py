"""Advice on runs that were trained for real: `explain()` and the report of its log end in the same lines."""

import itertools
import re
import warnings

import pytest
from advised import alarms_in, outcome_of
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, logged, rolled_out

import trl_replay
from trl_replay.testing import make_trainer

RIGHT = [1.0, 1.0, 1.0, 1.0]
LEARNS = pytest.mark.generates
FULL = [[HALF, LIVE, LIVE]] * 3
"""Batches that fill the buffer."""
MOSTLY_DEAD = [[DEAD, DEAD, LIVE]]
NARROW = {"replay_correction": "sequence_mask(low=0.99, high=1.01)"}
SLOW = {"learning_rate": 1e-4}
SUMS = [f"{one}+{other}=" for one in range(6) for other in range(6)]


def numbers(prompts, trainer):
    """Completions that nobody has to generate, where rewards do not depend on them."""
    tokenizer, first = trainer.processing_class, 100 + len(prompts) * trainer.state.global_step
    completions = [[*tokenizer(str(first + row))["input_ids"], tokenizer.eos_token_id] for row in range(len(prompts))]
    return rolled_out(prompts, trainer, completions)


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


def constant(value):
    def fixed(completions, **_):
        return [value] * len(completions)

    return fixed


def spread(completions, **_):
    """A length term that hardly ever is equal over a group."""
    return [len(set(text)) + sum(map(ord, text)) / 1e4 for text in completions]


def begins(completions, **_):
    return [float(text.startswith("7")) for text in completions]


def says(*characters):
    """Accuracy that pays 1 for one of these characters."""

    def accuracy(completions, **_):
        return [float(any(one in text for one in characters)) for text in completions]

    return accuracy


def three_digits(completions, **_):
    return [float(len({one for one in text if one.isdigit()}) == 3) for text in completions]


def scripted(*batches):
    return lambda: Rewards(*batches)


RUNS = {
    "all wrong": (scripted([DEAD] * 3), SLOW, {}, "No group was ever live"),
    "all right": (scripted(*FULL, [RIGHT] * 3), SLOW, {}, "Most prompts are solved"),
    "nothing to replace": (scripted([LIVE, HALF, LIVE]), SLOW, {}, "Replay replaced 0% of the groups"),
    "acting": (scripted(*FULL, *MOSTLY_DEAD), SLOW, {}, "The reward fell from"),
    "a sum that always differs": ([constant(1.0), spread, begins], SLOW, {}, "Most groups are dead by 'begins'"),
    "a function that never pays": ([spread, says("zzz")], SLOW, {}, "Score a right answer with 'accuracy'"),
    "all rewards None": (constant(None), SLOW, {}, "Find out why no reward function scores"),
}  # fmt: skip


@pytest.mark.parametrize(("number", "kind"), list(enumerate(RUNS)))
def test_explain_and_the_report_of_its_log_begin_and_end_in_the_same_lines(tmp_path, said, number, kind):
    rewards, training, settings, words = RUNS[kind]
    given = {"max_steps": 40, **({"save_strategy": "steps", "save_steps": 4} if number % 2 else {}), **training}
    rewards = rewards() if getattr(rewards, "__name__", "") == "<lambda>" else rewards
    trainer, session = trained(tmp_path, rewards, SUMS, replay_start=0, **given, **settings)
    trainer.save_state()
    told = session.explain()
    first, *_ = told.splitlines()
    assert first.startswith("outcome: ")
    end = re.search(r"^(alarm: .*\n)*what to change: (.*)\Z", told, re.MULTILINE)
    assert end[2].startswith(words), told
    printed = " ".join(said("report", tmp_path).split())
    assert printed.startswith(first)
    assert printed.endswith(" ".join(end[0].split()))


def test_a_setting_that_masks_everything_warns_once_with_its_value_and_the_remedy(tmp_path, recwarn):
    session = train(tmp_path, *FULL, *FULL, *MOSTLY_DEAD, max_steps=26, learning_rate=2e-2, **NARROW).session
    (told,) = [str(warning.message) for warning in recwarn if "masked" in str(warning.message)]
    words = r"replay_correction='sequence_mask' \(low=0.99, high=1.01\)\. .*replay_correction=\"sequence_mask\""
    assert re.match(r"Of the rows replayed in 8 updates, (9\d|100)% were masked.*" + words, told)
    assert session.metrics["replay/gated_fraction"] > 0.5


@pytest.mark.parametrize("settings", [{}, {"replay_correction": "sequence_mask"}])
def test_no_warning_where_something_is_left_or_nothing_was_meant_to_be(tmp_path, settings):
    """Warnings are errors here."""
    train(tmp_path, *FULL, *MOSTLY_DEAD, max_steps=14, learning_rate=1e-4, **settings)


def test_imitation_leaves_failures_out_by_intent(tmp_path):
    """Of 24 rows one trains, which is neither a warning nor advice to take another correction."""
    one = [1.0] + [0.0] * 23
    script = *[[one]] * 3, *[[[0.0] * 24], [one]] * 9
    settings = {"num_generations": 24, "per_device_train_batch_size": 24, "learning_rate": 1e-2, "max_steps": 21}
    run = train(tmp_path, *script, replaced=9, replay_correction="imitation", **settings)  # a warning would raise
    assert run.logged("replay/gated_fraction")[-1] == pytest.approx(23 / 24)


@LEARNS
def test_a_collapse_is_said_once_while_it_happens_with_the_checkpoint_to_go_back_to(tmp_path, recwarn):
    saving = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    trainer = make_trainer(tmp_path, three_digits, SUMS, max_steps=40, learning_rate=0.1, **saving)
    session = trl_replay.attach(trainer)
    trainer.train()
    (told,) = [str(one.message) for one in recwarn if "the policy has collapsed" in str(one.message)]
    assert "hardly a group is live" in told
    assert "collapsed" in alarms_in(trainer.state.log_history)
    assert (
        session.explain().splitlines()[-1].startswith("what to change: Go back to a checkpoint from when groups were")
    )


@pytest.mark.parametrize("format_too", [False, True])
def test_170_a_function_that_alone_scores_its_groups_is_dead_where_their_sum_is(tmp_path, format_too):
    """Of three groups one is maths, and dead later; a third function that varies makes it live."""
    batches = itertools.count()

    def of(first):
        def routed(completions, **_):
            maths = DEAD if first and next(batches) >= 12 else LIVE
            return [*maths, *[None] * 8] if first else [*[None] * 4, *LIVE, *LIVE]

        routed.__name__ = "maths" if first else "code"
        return routed

    functions = [of(True), of(False), *([spread] if format_too else [])]
    trainer, session = trained(tmp_path, functions, max_steps=24, learning_rate=1e-4)
    assert logged(trainer, "replay/dead_fraction/maths") == [*[0.0] * 12, *[1.0] * 12]
    assert logged(trainer, "replay/live_without/maths") == [1.0] * 12 * format_too
    assert logged(trainer, "replay/dead_fraction/code") == [0.0] * 24
    assert logged(trainer, "replay/live_without/code") == []
    assert ("Most groups are dead by 'maths'" in session.explain()) == format_too


@pytest.mark.parametrize(
    ("settings", "limit", "left"),
    [
        ({"replay_max_age": 1}, "replay_max_age", 18),
        ({"replay_max_uses": 1}, "replay_max_uses", 17),
        ({"replay_max_fraction": 0.34}, "replay_max_fraction", 19),
    ],
)
def test_a_limit_that_holds_replay_back_is_named_with_what_it_cost(tmp_path, settings, limit, left):
    """Two of three groups are dead: the one that was stored last fills one slot, those that were too old a second."""
    rewards = Rewards([LIVE, LIVE, LIVE], *[[DEAD, DEAD, LIVE]] * 19)
    _, session = trained(tmp_path, rewards, max_steps=20, learning_rate=1e-5, replay_start=0, **settings)
    assert f"  {left} x {limit} left a slot as it was that a stored group could have filled" in session.explain()


def test_the_outcome_and_a_fall_go_by_the_reward_that_counts(tmp_path):
    """Accuracy falls to nothing while length makes up for it."""
    right = Rewards(*[[HALF] * 3] * 20, *[[DEAD] * 3] * 20)
    long = Rewards(*[[[0.0, 0.1, 0.2, 0.3]] * 3] * 20, *[[[0.6, 0.7, 0.8, 0.9]] * 3] * 20)
    right.__name__, long.__name__ = "accuracy", "length"
    trainer, session = trained(tmp_path, [right, long], max_steps=40, replay_reward="accuracy", replay_dry_run=True)
    lines = session.explain().splitlines()
    assert lines[0].startswith("outcome: accuracy 0.5 → 0 over 480 completions, 40 updates")
    assert lines[-1].startswith("what to change: Go back to a checkpoint")
    assert str(outcome_of(trainer.state.log_history)).startswith("accuracy 0.5 → 0"), "the log alone names it"
    plain = [{key: value for key, value in entry.items() if "judged_by" not in key} for entry in
             trainer.state.log_history]  # fmt: skip
    assert str(outcome_of(plain)).startswith("reward 0.65 → 0.75 (accuracy 0.5 → 0; length 0.15 → 0.75) over")


def test_a_clip_range_that_is_narrower_than_an_update_moves_is_named_with_one_that_is_not(tmp_path):
    """The range of GSPO's paper, which most replayed rows leave after one update."""
    narrow = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"}
    trainer, session = trained(tmp_path, three_digits, SUMS, max_steps=24, learning_rate=1e-3, **narrow)
    told = session.explain()
    width = float(re.findall(r"Raise epsilon and epsilon_high to ([0-9.e-]+) or more", told)[0])
    assert width > 10 * narrow["epsilon"]
    wide, _ = trained(
        tmp_path, three_digits, SUMS, max_steps=24, **{**narrow, "epsilon": width, "epsilon_high": width}
    )
    clipped = [logged(each, "replay/clip_ratio") for each in (trainer, wide)]
    assert min(sum(values) / len(values) for values in clipped) == sum(clipped[1]) / len(clipped[1])
