"""What a success is: known while the reward that counts has two values, said where it is not, or given."""

from functools import partial

import pytest
from scenarios import train
from support import LIVE, Rewards

pytestmark = pytest.mark.usefixtures("all_metrics")

WRONG, RIGHT = [0.0] * 4, [1.0] * 4
GRADES = [0.0, 0.25, 0.5, 1.0]
JUDGED = ("replay/all_wrong_fraction", "replay/all_right_fraction")
AT_ENDS = ("replay/lowest_fraction", "replay/highest_fraction")


def scaled(batches, low, high):
    """Rewards of 0 and 1 in other units."""
    return [[[low + (high - low) * one for one in group] for group in batch] for batch in batches]


successes = partial(train, replaced=0, replay_retire_passes=4)
"""Trains where it counts what a success is."""


def judged(run):
    return [run.session.metrics[key] for key in JUDGED]


PAIRS = {
    "0 and 1": (0.0, 1.0, {}),
    "-1 and 0": (-1.0, 0.0, {}),
    "successes of 0.3": (0.0, 0.3, {}),
    "a weight of 0.3": (0.0, 1.0, {"reward_weights": [0.3]}),
    "an offset of 1": (1.0, 2.0, {}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_of_two_values_the_higher_one_passes(tmp_path, pair):
    low, high, settings = PAIRS[pair]
    script = ([WRONG, RIGHT, LIVE], [WRONG] * 3, [RIGHT, RIGHT, LIVE])
    run = successes(tmp_path, *scaled(script, low, high), replaced=None, max_steps=3, **settings)
    for keys in (JUDGED, AT_ENDS):
        assert [run.logged(key) for key in keys] == [pytest.approx([1 / 3, 1, 0]), pytest.approx([1 / 3, 0, 2 / 3])]
    assert "not known" not in run.session.explain()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_of_one_value_nothing_is_called_right_or_wrong(tmp_path, value):
    run = successes(tmp_path, [[value] * 4] * 3, max_steps=9)
    session = run.session
    assert session.metrics.keys().isdisjoint(JUDGED)
    assert [session.metrics[key] for key in AT_ENDS] == [1.0, 1.0]
    told = session.explain()
    assert f"it is unknown what a success is: the reward that counts (scripted) has had the values {value:g}" in told
    assert "solved" not in told.replace("SOLVED", "")
    assert "passes" not in told.replace("replay_retire_passes", "").replace("training passes", "")


def test_a_third_value_ends_what_needs_a_success_and_says_which_setting_to_give(tmp_path):
    grade = Rewards([RIGHT, LIVE, LIVE], [GRADES, RIGHT, WRONG], name="grade")
    both = {"rewards": [grade, Rewards([WRONG] * 3, name="tone")], "beta": 0.1, "replaced": None}
    with pytest.warns(UserWarning, match="what a success is:") as caught:
        run = successes(tmp_path, **both, replay_start="pass_rate(0.1)")
    (told,) = [str(warning.message) for warning in caught if "success" in str(warning.message)]
    assert "(grade + tone) has had the values 0, 0.25, 0.5, 1;" in told
    assert "replay_retire_passes=4 and replay_start='pass_rate(0.1)' can't act" in told
    assert "Set replay_pass_reward" in told
    assert "replay_reward to one of 'grade', 'tone'" in told
    assert told in run.session.explain()
    assert [len(run.logged(key)) for key in JUDGED] == [1, 1], "until then"
    assert [run.logged(key)[-1] for key in AT_ENDS] == [pytest.approx(1 / 3)] * 2


@pytest.mark.parametrize("outlier", [-2e6, 2e6])
def test_162_one_huge_reward_leaves_other_rewards_apart(tmp_path, outlier):
    """Next to it, in the batch and ever after, 0 and 1 are two values: three in all, which tell no success."""
    once = [outlier, 0.0, 0.0, 1.0]
    with pytest.warns(UserWarning, match="replay_retire_passes=4 can't act"):
        run = successes(tmp_path, [once, RIGHT, WRONG], [RIGHT, RIGHT, WRONG], max_steps=2, replaced=None)
    told = ", ".join(f"{value:.4g}" for value in sorted([outlier, 0.0, 1.0]))
    assert f"has had the values {told};" in run.session.explain()
    assert run.session.metrics.keys().isdisjoint(JUDGED)
    assert [run.logged(key) for key in AT_ENDS] == [
        pytest.approx([0.0 if outlier < 0 else 1 / 3] * 2),
        pytest.approx([1 / 3, 2 / 3] if outlier < 0 else [0.0] * 2),
    ]
    assert run.counters["stored"] == 1, "no group counts as solved"


def test_162_small_rewards_are_apart_and_rounding_errors_of_large_parts_are_not(tmp_path):
    """Of three parts of about 1, sums of 0 and 1e-7 are one value; of one function of 1e-7 they are two."""
    script = [[-0.3] * 4, [-0.30000001192] * 4, [0.7] * 4]
    parts = [Rewards([[0.1] * 4] * 3, name="a"), Rewards([[0.2] * 4] * 3, name="b"), Rewards(script)]
    assert judged(successes(tmp_path, rewards=parts, max_steps=1)) == pytest.approx([2 / 3, 1 / 3])
    small = scaled(([WRONG, RIGHT, LIVE],), 0.0, 1e-7)
    assert judged(successes(tmp_path, *small, max_steps=1)) == pytest.approx([1 / 3, 1 / 3])


def test_without_a_setting_that_needs_a_success_grades_are_no_matter(tmp_path):
    """Warnings are errors here; explain() names the value to set."""
    told = train(tmp_path, [GRADES, RIGHT, WRONG]).session.explain()
    assert "has had the values 0, 0.25, 0.5, 1; " in told
    assert "replay_pass_reward=1, if the best so far is one" in told


def test_a_curriculum_passes_over_nothing_while_it_is_not_known_what_is_solved(tmp_path):
    with pytest.warns(UserWarning, match="the plugin 'skip_solved' can't act"):
        run = train(tmp_path, [RIGHT, RIGHT, GRADES], replay_plugins=["skip_solved"])
    prompts = run.session.prompts
    assert prompts is not None
    assert prompts.passes.sum() == 0
    assert not (prompts.pass_rate >= 0).any(), "NaN"


def test_resuming_goes_on_with_the_values_seen(tmp_path):
    train(tmp_path, [RIGHT, LIVE, LIVE], save_strategy="steps", save_steps=2, max_steps=2)
    run = train(tmp_path, [RIGHT] * 3, resume=str(tmp_path / "checkpoint-2"))
    assert run.session.metrics["replay/all_right_fraction"] == 1.0


def test_the_anchor_of_graded_rewards_holds_what_is_dead_at_the_lowest_reward(tmp_path):
    """These groups stay, and dead ones above them are replaced."""
    part = [0.25] * 4
    settings = {"max_steps": 6, "beta": 0.1, "replay_kl": "all_wrong"}
    with pytest.warns(UserWarning, match=r"replay_kl='all_wrong' uses the lowest of them\. Set replay_pass_reward"):
        metrics = train(tmp_path, [GRADES] * 3, [WRONG, part, RIGHT], **settings).session.metrics
    assert metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert metrics["replay/dead_fraction_after"] == pytest.approx(1 / 3)
