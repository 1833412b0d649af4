"""Weighted sums, means and deviations of rewards, in which a missing value (NaN, for None) does not count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def weighted_rewards(rewards: Floats, weights: Floats) -> Floats:
    """Weighted sum over the reward functions, the last axis; NaN where no function scored.

    Args:
        rewards (`(…, functions)`): Raw rewards, NaN where None.
        weights (`(functions,)`): The trainer's `reward_weights`.
    """
    total = sum_of_scored(rewards * weights, -1)
    unscored = np.isnan(rewards).all(axis=-1)
    return np.where(unscored, np.nan, total)


def sum_of_scored(values: Floats, axis: int) -> Floats:
    """Sum over an axis without NaN; 0 where there is nothing."""
    return np.asarray(np.where(np.isnan(values), 0.0, values).sum(axis=axis))


def mean_of_scored(values: Floats) -> Floats:
    """Mean over axis 1 without NaN; 0 where there is nothing."""
    scored = ~np.isnan(values)
    count = np.maximum(scored.sum(axis=1), 1)
    return np.asarray(sum_of_scored(values, 1) / count)


def bessel_std(values: Floats) -> Floats:
    """Bessel-corrected standard deviation over axis 1, as TRL's; NaN left out, 0 with fewer than two values.

    Args:
        values (`(n, m)` or `(n, m, …)`): Numbers, NaN where one is missing.
    """
    scored = ~np.isnan(values)
    centered = values - mean_of_scored(values)[:, None]
    squares = np.where(scored, centered, 0.0) ** 2
    degrees = np.maximum(scored.sum(axis=1) - 1, 1)
    return np.asarray(np.sqrt(squares.sum(axis=1) / degrees))


def pass_rates(passed: Bools, failed: Bools) -> Floats:
    """Share of a group's scored rows that pass; 0 where no row was scored.

    Args:
        passed (`(n, G)`): Rows that pass.
        failed (`(n, G)`): Rows that nothing scored.
    """
    scored = (~failed).sum(axis=1)
    return np.asarray(passed.sum(axis=1) / np.maximum(scored, 1))
