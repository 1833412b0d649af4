"""The plugin's strategies: trl_replay's contract suites, the decay by hand, and a training run."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from trl_replay_freshness import REWARD_HALF_LIFE, abs_reward, freshness, make_decayed, make_half_life

import trl_replay
from trl_replay.base.validation import Named
from trl_replay.testing import (
    EvictorContract,
    SamplerContract,
    ScorerContract,
    make_context,
    make_groups,
    make_table,
    make_trainer,
)


class TestHalfLife(SamplerContract):
    strategy = staticmethod(make_half_life())


class TestDecayed(EvictorContract):
    strategy = staticmethod(make_decayed())


class TestAbsReward(ScorerContract):
    strategy = staticmethod(abs_reward)


def one_live_group_of_three(completions, **kwargs):
    return [float(row % 2) if row < 4 else 0.0 for row in range(len(completions))]


def test_weight_halves_with_every_half_life():
    table = make_table([8.0, 8.0, 8.0, 8.0], update=[100, 95, 90, 70])
    np.testing.assert_allclose(freshness(table, make_context(table, update=100), 10.0), [8, 8 / math.sqrt(2), 4, 1])


def test_scores_below_zero_are_worth_nothing_at_any_age():
    table = make_table([-5.0, 0.0, 1.0], update=[0, 100, 0])
    np.testing.assert_array_equal(make_decayed(50)(table, make_context(table, update=100)), [0, 0, 0.25])


def test_an_infinite_half_life_is_no_decay():
    table = make_table([1.0, 2.0], update=[0, 100])
    np.testing.assert_array_equal(make_decayed(math.inf)(table, make_context(table, update=10**6)), [1, 2])


def test_draws_in_proportion_to_the_decayed_score():
    table = make_table([4.0, 4.0, 1.0], update=[100, 90, 100])  # weights 4, 2, 1
    context = make_context(table, update=100)
    sample = make_half_life(10.0)
    drawn = Counter(int(sample(table, 1, context)[0]) for _ in range(7_000))
    expected = {0: 4_000, 1: 2_000, 2: 1_000}
    chi_square = sum((drawn[row] - count) ** 2 / count for row, count in expected.items())
    assert chi_square < 13.8, f"{drawn} against {expected}: p < 0.001"


def test_the_older_of_two_equal_scores_leaves_a_full_buffer():
    table = make_table([3.0, 3.0, 2.0], update=[0, 10, 10])
    ranks = make_decayed(5.0)(table, make_context(table, update=10))
    assert ranks.argmin() == 0, f"the fresh group of score 2 must outlive the old one of score 3: {ranks}"


def test_abs_reward_is_the_mean_magnitude_of_the_scored_rows():
    rewards = [[-1.0, 1.0, 0.0, 0.0], [2.0, np.nan, np.nan, 0.0], [np.nan] * 4]
    np.testing.assert_allclose(abs_reward(make_groups(rewards), make_context()), [0.5 + 1e-6, 1 + 1e-6, 1e-6])


@pytest.mark.parametrize("make", [make_half_life, make_decayed])
@pytest.mark.parametrize("half_life", [0, -1, float("nan"), "ten", None, True])
def test_a_half_life_that_is_no_positive_number_is_named(make, half_life):
    with pytest.raises(trl_replay.ConfigurationError, match=r"freshness/.*half_life=.*above 0"):
        make(half_life)


def test_the_preset_decays_with_the_papers_time_constant():
    half_life = Named.read(REWARD_HALF_LIFE.settings["replay_sampler"]).arguments["half_life"]
    assert 2 ** (-100 / half_life) == pytest.approx(math.exp(-100 / 500))


def test_a_trainer_learns_with_the_preset(tmp_path):
    trainer = make_trainer(tmp_path, one_live_group_of_three)
    session = trl_replay.attach(trainer, replay_preset="freshness/reward_half_life", replay_buffer_size=16)
    trainer.train()
    assert session.plugins == ["freshness"]
    assert session.config.replay_max_fraction == 0.5
    assert session.buffer.capacity == 16, "a setting of the user's own wins over the preset's"
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(1 / 3), "half of three groups is one"
    assert session.metrics["replay/score_mean"] == pytest.approx(0.5 + 1e-6)


def test_a_trainer_learns_with_sampler_and_evictor_by_name(tmp_path):
    trainer = make_trainer(tmp_path, one_live_group_of_three)
    settings = {
        "replay_sampler": "freshness/half_life(half_life=2)",
        "replay_evictor": "decayed",
        "replay_buffer_size": 2,
    }
    with trl_replay.attached(trainer, **settings) as session:
        trainer.train()
        assert session.metrics["replay/replaced_fraction"] > 0
        assert len(session.buffer) == 2
        assert session.buffer.table.update.min() >= 1, "the oldest of equal scores left"


def test_a_wrong_half_life_is_reported_at_attach(tmp_path):
    trainer = make_trainer(tmp_path, one_live_group_of_three)
    before = dict(trainer.__dict__)
    with pytest.raises(trl_replay.ConfigurationError, match="half_life=0"):
        trl_replay.attach(trainer, replay_sampler="half_life(half_life=0)")
    assert trainer.__dict__ == before
