"""From row columns and rewards to the view of groups, and which groups are dead; by hand."""

import numpy as np

from trl_replay.batch.groups import advantage_noise, blank
from trl_replay.compat import RewardSetup

EPS = 8 * float(np.finfo(np.float32).eps)


def setup(scale="group", aggregation="sum_then_normalize", *weights):
    return RewardSetup(np.array(weights or [1.0]), scale, aggregation)


def shared(rows, advantages):
    columns = blank(rows[0], len(rows)) | {"row": np.array(rows), "advantages": np.array(advantages)}
    columns["prompt"] = np.array(rows) * 10
    columns["lengths"], columns["trainable"], columns["items"] = (np.array(rows) + shift for shift in (1, 2, 3))
    return columns


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
