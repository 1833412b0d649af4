"""`replay_reward`: which reward function counts. Users pay sums: format, accuracy, length."""

import numpy as np
import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.loss.supply import EXCLUDED, ROWS
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.usefixtures("all_metrics")

SPREAD = [0.1, 0.2, 0.3, 0.4]
"""Rewards of a length term: never equal."""


def functions(*accuracy, length=SPREAD):
    """A length term that is never equal over a group, and accuracy."""
    return [Rewards([length] * 3, name="length"), Rewards(*accuracy, name="accuracy")]


def accurate(folder, *accuracy, **settings):
    """Trains where accuracy counts."""
    return train(folder, **{"rewards": functions(*accuracy), "replay_reward": "accuracy", **settings})


OVERLONG = {"advantages": lambda groups: np.where(groups.lengths > 5, np.nan, groups.advantages)}
"""A mask of rows above a length, as in docs/hooks.md."""


@pytest.mark.generates
@pytest.mark.parametrize("plugin", [{"hooks": OVERLONG}, {"replay_plugins": ["rloo"]}], ids=["overlong", "rloo"])
def test_109_a_plugin_that_shapes_advantages_brings_no_dead_group_to_life(tmp_path, plugin):
    """By the function that counts, whose groups the sum never has equal."""
    run = accurate(tmp_path, [DEAD, DEAD, LIVE], **plugin)
    assert run.counters["dead"] >= 8
    assert (run.table.reward_mean > 0).all(), "of accuracy"


def test_109_signs_of_groups_that_are_alike_by_the_function_train(tmp_path):
    run = accurate(tmp_path, [DEAD, DEAD, LIVE], max_steps=2, replaced=0, replay_preset="sign_advantage")
    assert run.counters["dead"] == 0


@pytest.mark.parametrize("value", [0.7, 100.1])
def test_110_a_mask_on_a_dead_group_leaves_it_dead(tmp_path, value):
    """TRL divides rounding errors of eight equal rewards by almost nothing; a plugin leaves these on other rows."""
    dead, live = [value] * 8, [value + 1, *[value] * 7]
    run = train(tmp_path, [dead, dead, live], hooks=OVERLONG, num_generations=8)
    assert run.counters["dead"] >= 8
    assert (run.table.reward_std > 0.1).all()


NOT_SCORED = [None] * 4


def judged_by_sum(folder, *script, last=HALF, **settings):
    """Trains where the function that counts does not score the first group, and two functions alternate."""
    apart = Rewards(*script or [[[0.1, 0.2, 0.3, 0.9], DEAD, DEAD]], name="apart")
    right = Rewards([NOT_SCORED, LIVE, last], name="accuracy")
    return accurate(folder, **{"rewards": [apart, right], **settings})


@pytest.mark.parametrize("selector", ["min_range", "min_nontrivial", "pass_rate"])
def test_111_a_live_group_that_the_function_does_not_score_keeps_its_place(tmp_path, selector):
    """It is judged by the sum, which differs: another task, say."""
    run = judged_by_sum(tmp_path, replay_selector=selector, replay_record="loss", max_steps=6, last=DEAD)
    assert run.counters["stored"] > 8
    assert not any(bool((after[ROWS][:4, 0] < 0).any()) for _, after in run.steps)


@pytest.mark.parametrize("scorer", ["pass_rate", "freshness/abs_reward", "fresh_per/mean_abs_reward"])
def test_111_the_priority_of_a_group_that_the_function_does_not_score_is_that_of_the_sum(tmp_path, scorer):
    assert (judged_by_sum(tmp_path, replay_scorer=scorer, max_steps=2, replaced=0).table.score > 0.2).all()


def test_111_gfpo_normalizes_the_sum_and_trains_groups_that_the_function_does_not_score(tmp_path):
    advantages = []
    for which in (None, "accuracy"):
        settings = {"replay_reward": which, "replay_preset": "gfpo", "max_steps": 1, "replaced": 0}
        run = judged_by_sum(tmp_path / str(which), [[0.1, 0.2, 0.3, 0.9]] * 3, **settings)
        advantages.append(run.steps[0][1]["advantages"].tolist())
        assert not bool((run.steps[0][1][ROWS][:4, 1] & EXCLUDED).all())
    assert advantages[0] == advantages[1]


@pytest.mark.parametrize("least", [0.9, 0.7, 0.35, -0.1])
def test_108_a_reward_of_the_least_of_a_success_is_one(tmp_path, least):
    """TRL keeps rewards as float32: 0.9 is less than 0.9 there."""
    right, mixed, wrong = [least] * 4, [least, -1.0, -1.0, -1.0], [-1.0] * 4
    metrics = train(tmp_path, [right, mixed, wrong], max_steps=2, replay_pass_reward=least).session.metrics
    assert metrics["replay/all_right_fraction"] == pytest.approx(1 / 3)
    assert metrics["replay/all_wrong_fraction"] == pytest.approx(1 / 3)


def test_a_group_that_the_function_does_not_score_is_judged_by_the_sum(tmp_path):
    run = accurate(tmp_path, [NOT_SCORED, DEAD, LIVE], max_steps=3)
    assert run.counters["dead"] == 3, "the second group of each batch"
    assert "3 x a group was judged by the weighted sum" in run.session.explain()


def test_92_a_name_that_several_functions_share_raises_with_the_remedy(tmp_path):
    trainer = make_trainer(tmp_path, [Rewards([LIVE]), Rewards([DEAD])])
    with pytest.raises(ConfigurationError, match=r"names 2 of .*Give each a `__name__` of its own"):
        trl_replay.attach(trainer, replay_reward="scripted")


def test_100_a_function_of_negative_weight_can_not_count(tmp_path):
    trainer = make_trainer(tmp_path, functions([LIVE, DEAD, DEAD]), reward_weights=[1.0, -0.5])
    with pytest.raises(ConfigurationError, match=r"replay_reward='accuracy' names .* weight -0\.5.*positive weight"):
        trl_replay.attach(trainer, replay_reward="accuracy")


def test_101_a_group_of_a_file_is_dead_by_the_function_that_counts(tmp_path):
    trainer = make_trainer(tmp_path, functions([LIVE, DEAD, DEAD]))
    session = trl_replay.attach(trainer, replay_reward="accuracy")
    rows = [
        {"prompt": f"{group}=", "completion": text, "reward/accuracy": right, "reward/length": length}
        for group, rewards in enumerate(([0.0] * 4, LIVE))
        for text, right, length in zip("2345", rewards, SPREAD, strict=True)
    ]
    assert session.add(rows) == 1
    assert session.totals.reasons["a group was refused: its rewards do not differ"] == 1
    assert session.totals.counters["refused"] == 1


@pytest.mark.parametrize("preset", [None, "repo"])
def test_136_groups_that_the_function_does_not_score_are_mixed_by_the_sum(tmp_path, preset):
    rewards = [Rewards([LIVE] * 3, [DEAD] * 3, name="apart"), Rewards([NOT_SCORED] * 3, name="accuracy")]
    settings = {"replay_sampler": "same_prompt", "replay_mixer": "inject"}
    if preset is not None:
        settings = {"replay_preset": preset, "replay_sampler": "same_prompt(entries=1)"}
    table = accurate(tmp_path, rewards=rewards, max_steps=3, replaced=6, **settings).table
    assert (table.row_reward == table.row_total).all()
