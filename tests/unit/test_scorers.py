"""Scorers by hand."""

import numpy as np
import pytest

from trl_replay.strategies import policies as scorers
from trl_replay.testing import make_context, make_groups

GROUPS = make_groups([[1, 0, 0, 0], [1, 1, 1, 0], [0.2, 0.4, 0.1, 0.9]], update=6)


STD_OF_ONE_IN_FOUR = 0.5  # sqrt(((3/4)² + 3 (1/4)²) / 3)


def test_reward_std_is_the_bessel_corrected_deviation():
    values = scorers.reward_std(GROUPS, make_context())
    np.testing.assert_allclose(values[:2], STD_OF_ONE_IN_FOUR)
    np.testing.assert_allclose(values[2], np.std([0.2, 0.4, 0.1, 0.9], ddof=1))


def test_advantage_std_is_the_sum_of_magnitudes_times_the_deviation():
    magnitudes = (0.75 + 3 * 0.25) / (STD_OF_ONE_IN_FOUR + 1e-4)
    np.testing.assert_allclose(scorers.advantage_std(GROUPS, make_context())[:2], magnitudes * STD_OF_ONE_IN_FOUR)


def test_mean_reward_leaves_out_rows_that_no_function_scored():
    np.testing.assert_allclose(scorers.mean_reward(GROUPS, make_context()), [0.25, 0.75, 0.4])
    partial = make_groups([[1.0, np.nan, 0.0, np.nan]])
    np.testing.assert_allclose(scorers.mean_reward(partial, make_context()), [0.5])


def test_recency_grows_with_the_update_and_is_positive_from_the_first():
    np.testing.assert_array_equal(scorers.recency(GROUPS, make_context()), [7, 7, 7])
    assert (scorers.recency(make_groups([[1, 0]], update=0), make_context()) > 0).all()


def test_constant_is_one_for_all():
    np.testing.assert_array_equal(scorers.constant(GROUPS, make_context()), [1, 1, 1])


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, [0.5, 0.5, 0.5]), ({"target": 0.25}, [1, 1 / 3, 1]), ({"target": 1.0, "threshold": 0.3}, [0.25, 0.75, 0.5])],
)
def test_pass_rate_is_one_at_the_target_and_falls_to_zero_at_the_far_end(kwargs, expected):
    np.testing.assert_allclose(scorers.make_pass_rate_scorer(**kwargs)(GROUPS, make_context()), expected)
