"""From row columns and rewards to the view of groups, and which groups are dead; by hand."""

import numpy as np
import pytest
import torch

from trl_replay.batch.groups import advantage_noise, bessel_std, blank, view, weighted_rewards
from trl_replay.compat import RewardSetup

EPS = 8 * float(np.finfo(np.float32).eps)


def setup(scale="group", aggregation="sum_then_normalize", *weights):
    return RewardSetup(np.array(weights or [1.0]), scale, aggregation)


def shared(rows, advantages):
    columns = blank(rows[0], len(rows)) | {"row": np.array(rows), "advantages": np.array(advantages)}
    columns["prompt"] = np.array(rows) * 10
    columns["lengths"], columns["trainable"], columns["items"] = (np.array(rows) + shift for shift in (1, 2, 3))
    return columns


@pytest.mark.parametrize(("eighths", "dead"), [(0.9, True), (2.0, False)])
def test_trls_own_advantages_of_equal_rewards_are_dead_and_others_than_its_own_are_not(eighths, dead):
    """One rounding error of a mean is an eighth of the noise; what is further off somebody has shaped."""
    rewards = np.full((4, 1), 0.75)
    noise = float(advantage_noise(rewards.reshape(1, 4, 1), setup())[0])
    assert noise == pytest.approx(EPS * 0.75 / 1e-4)
    columns = shared([0, 1, 2, 3], [0.0, 0.0, eighths * noise / 8, 0.0])
    assert view(columns, torch.from_numpy(rewards), setup(), 4, 0).dead.tolist() == [dead]


def test_the_noise_grows_with_rewards_and_their_weights_and_falls_with_their_deviation():
    rewards = np.array([[[2.0, -1.0], [2.0, 3.0]], [[1.0, np.nan], [0.0, 0.0]]])
    weighted = setup("none", "sum_then_normalize", 1.0, -2.0)
    np.testing.assert_allclose(advantage_noise(rewards, weighted), [EPS * 8.0, EPS * 1.0])
    sums = [[4.0, -4.0], [1.0, 0.0]]
    deviations = [np.std(row, ddof=1) for row in sums]
    by_group = advantage_noise(rewards, setup("group", "sum_then_normalize", 1.0, -2.0))
    np.testing.assert_allclose(by_group, [EPS * 8.0 / (deviations[0] + 1e-4), EPS / (deviations[1] + 1e-4)])
    of_all = np.std([4.0, -4.0, 1.0, 0.0], ddof=1) + 1e-4
    by_batch = advantage_noise(rewards, setup("batch", "sum_then_normalize", 1.0, -2.0))
    np.testing.assert_allclose(by_batch, [EPS * 8.0 / of_all, EPS / of_all])


def test_functions_that_are_normalized_first_have_the_noise_of_each_and_of_their_sum():
    rewards = np.array([[[1.0, 5.0], [0.0, 5.0]], [[1.0, 2.0], [0.0, 0.0]]])
    std = np.array([[np.sqrt(0.5), 0.0], [np.sqrt(0.5), np.sqrt(2.0)]]) + 1e-4
    normalized = np.array([[[0.5, 0.0], [-0.5, 0.0]], [[0.5, 1.0], [-0.5, -1.0]]]) / std[:, None]
    errors = EPS * np.array([[1.0, 5.0], [1.0, 2.0]]) / std
    of_level = EPS * 5.0 / 1e-4
    errors[0, 1] = 0.0  # which all rows share
    errors[1] += 2 * normalized[1].max(axis=0) * 1e-4 / std[1]  # two functions that vary may cancel out
    sums = normalized.sum(axis=2)
    expected = (errors.sum(axis=1) + EPS * np.abs(sums).max(axis=1)) / (np.std(sums, ddof=1) + 1e-4)
    found = advantage_noise(rewards, setup("group", "normalize_then_sum", 1.0, 1.0))
    np.testing.assert_allclose(found, expected)
    with_levels = advantage_noise(rewards, setup("group", "normalize_then_sum", 1.0, 1.0), of_level=True)
    np.testing.assert_allclose(with_levels - found, [of_level / (np.std(sums, ddof=1) + 1e-4), 0.0])


def test_deviations_and_sums_leave_out_what_no_function_scored():
    values = np.array([[1.0, np.nan, 4.0], [2.0, np.nan, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(bessel_std(values), [np.std([1.0, 4.0], ddof=1), 0.0, 0.0])
    rewards = np.array([[[1.0, np.nan], [np.nan, np.nan], [2.0, 3.0]]])
    np.testing.assert_array_equal(weighted_rewards(rewards, np.array([2.0, 10.0])), [[2.0, np.nan, 34.0]])
