"""Weighted sums, means, and standard deviations of rewards that ignore missing values (NaN, for None)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, nearest

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NOISE = 8 * float(np.finfo(np.float32).eps)
"""Relative float32 error allowed for a group's mean and differences; 8 eps covers the sums of TRL's usual group
sizes."""
ADVANTAGE_NOISE, LARGEST_NOISE = 1e-6, 0.5
"""Advantages of the first size or less, times the largest reward if that is above 1, are 0: rounding errors of
rewards, which TRL divides by 1e-8, are a tenth of it. Half a standard deviation never is an error."""


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """A trainer's rule from rewards to advantages.

    Attributes:
        weights (`(functions,)` float64): The trainer's `reward_weights`.
        scale (`str`): `args.scale_rewards`: `"group"`, `"batch"` or `"none"`.
        aggregation (`str`): `args.multi_objective_aggregation`.
    """

    weights: Floats
    scale: str
    aggregation: str

    @property
    def over_batch(self) -> bool:
        """True if a group's advantages depend on the other groups of its batch."""
        return self.scale == "batch" or self.aggregation == "normalize_then_sum"


class RewardRule(NamedTuple):
    """What gives a group its rewards and advantages: a stored group is valid as long as this is the same."""

    functions: tuple[str, ...]
    """Names of the reward functions."""
    sources: tuple[str, ...]
    """Hashes of their sources, where they can be seen."""
    weights: tuple[float, ...]
    """Of their rewards."""
    scale: str
    """`scale_rewards`."""
    aggregation: str
    """`multi_objective_aggregation`."""

    @classmethod
    def plain(cls) -> RewardRule:
        """Return that of a buffer without a trainer: one function."""
        return cls(("reward",), (), (1.0,), "group", "sum_then_normalize")

    @classmethod
    def of(cls, state: Sequence[Any]) -> RewardRule:
        """Return what a checkpoint has kept, as JSON does."""
        functions, sources, weights, scale, aggregation = state
        return cls(tuple(functions), tuple(sources), tuple(weights), scale, aggregation)

    def number_of(self, name: str | None) -> int | None:
        """Return the number of the reward function that counts (`replay_reward`); None for the weighted sum of all.

        Raises:
            ConfigurationError: There is none of that name, or several; or its weight is below 0.
        """
        if name is None:
            return None
        known = list(self.functions)
        if known.count(name) != 1:
            single = [repr(one) for one in known if known.count(one) == 1]
            remedy = f"Give one of {', '.join(single)}" if single else "Give each a `__name__` of its own"
            near = "" if name in known else nearest(name.removeprefix("rewards/").removesuffix("/mean"), known)
            raise ConfigurationError(
                f"replay_reward={name!r} names {known.count(name) or 'none'} of this trainer's reward functions."
                f"{near} {remedy}, or leave it out for their weighted sum."
            )
        weight = self.weights[known.index(name)]
        if weight < 0:
            raise ConfigurationError(
                f"replay_reward={name!r} names a reward function of weight {weight:g}: its higher values are worse, "
                "and can't tell what a success is. Name one of positive weight, or let the function return negative "
                "values."
            )
        return known.index(name)

    def in_words(self, name: str | None) -> str:
        """Return the reward that counts: `name`, or the weighted sum."""
        parts = zip(self.weights, self.functions, strict=True)
        return name or " + ".join(one if weight == 1 else f"{weight:g} × {one}" for weight, one in parts)

    def changes(self, now: RewardRule) -> list[str]:
        """Describe what is different now; nothing if both make the same advantages of the same completions."""
        pairs = {
            "reward functions": (self.functions, now.functions),
            "reward_weights": (self.weights, now.weights),
            "scale_rewards": ((self.scale,), (now.scale,)),
            "multi_objective_aggregation": ((self.aggregation,), (now.aggregation,)),
        }
        told = [f"{name} {_told(then)} → {_told(today)}" for name, (then, today) in pairs.items() if then != today]
        if self.functions == now.functions:
            # there is none of an environment's rewards
            sources = zip(self.functions, self.sources, now.sources, strict=False)
            told += [f"the source of {name!r}" for name, then, today in sources if then != today]
        return told


def _told(values: Iterable[object]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def weighted_rewards(rewards: Floats, weights: Floats) -> Floats:
    """Weighted sum over the reward functions, the last axis; NaN where no function scored.

    Args:
        rewards (`(…, functions)`): Raw rewards, NaN where None.
        weights (`(functions,)`): The trainer's `reward_weights`.
    """
    parts = rewards * weights
    if not np.isnan(parts).any():
        return np.asarray(parts.sum(axis=-1))
    return np.where(np.isnan(rewards).all(axis=-1), np.nan, sum_of_scored(parts, -1))


def sum_of_scored(values: Floats, axis: int) -> Floats:
    """Sum over an axis, ignoring NaN; 0 if there is no value."""
    return np.asarray(np.where(np.isnan(values), 0.0, values).sum(axis=axis))


def mean_of_scored(values: Floats) -> Floats:
    """Mean over axis 1, ignoring NaN; 0 if there is no value."""
    scored = ~np.isnan(values)
    if scored.all():
        return np.asarray(values.sum(axis=1) / values.shape[1])
    return np.asarray(sum_of_scored(values, 1) / np.maximum(scored.sum(axis=1), 1))


def bessel_std(values: Floats) -> Floats:
    """Bessel-corrected standard deviation over axis 1, as in TRL, ignoring NaN; 0 with fewer than two values.

    Args:
        values (`(n, m)` or `(n, m, …)`): Numbers, NaN where one is missing.
    """
    scored = ~np.isnan(values)
    squares = (values - mean_of_scored(values)[:, None]) ** 2
    if scored.all():
        return np.asarray(np.sqrt(squares.sum(axis=1) / max(values.shape[1] - 1, 1)))
    degrees = np.maximum(scored.sum(axis=1) - 1, 1)
    return np.asarray(np.sqrt(np.where(scored, squares, 0.0).sum(axis=1) / degrees))


def reaches(rewards: Floats, threshold: float) -> Bools:
    """Return which rewards are at least `threshold`, up to the rounding of float32, in which TRL keeps them: there,
    0.9 is less than 0.9.

    Args:
        rewards (`(…)`): Rewards, weighted sums of them, or means; NaN reaches nothing.
        threshold (`float`): In the same unit.
    """
    return np.asarray(rewards >= threshold - NOISE * max(1.0, abs(threshold)))


def pass_rates(passed: Bools, failed: Bools) -> Floats:
    """Share of a group's scored rows that pass; 0 if no row was scored.

    Args:
        passed (`(n, G)`): Rows that pass.
        failed (`(n, G)`): Rows that nothing scored.
    """
    scored = (~failed).sum(axis=1)
    return np.asarray(passed.sum(axis=1) / np.maximum(scored, 1))


def reward_noise(rewards: Floats, weights: Floats) -> Floats:
    """Return the largest advantage that float noise in the rewards alone can cause, `(n,)`, for batches without a live
    group to compare with.

    Args:
        rewards (`(n, G, functions)`): Raw rewards, NaN where None.
        weights (`(functions,)`): The trainer's `reward_weights`.
    """
    return np.asarray(NOISE * reward_sizes(rewards, weights).max(axis=1))


def reward_sizes(rewards: Floats, weights: Floats) -> Floats:
    """Return what the rounding error of each row's weighted sum grows with, `(…)`: the sum of its parts' sizes.

    Args:
        rewards (`(…, functions)`): Raw rewards, NaN where None.
        weights (`(functions,)`): The trainer's `reward_weights`.
    """
    return sum_of_scored(np.abs(rewards * weights), -1)


def have_equal_rewards(rewards: Floats, weights: Floats) -> Bools:
    """Return a mask of the groups whose weighted rewards differ by no more than float noise, `(n,)`; rows without any
    do not count."""
    return are_equal(weighted_rewards(rewards, weights), reward_noise(rewards, weights))


def are_equal(sums: Floats, noise: Floats) -> Bools:
    """Return a mask of the groups whose numbers, `(n, G)`, differ by no more than so much, `(n,)`; NaN does not
    count."""
    highest, lowest = np.fmax.reduce(sums, axis=1), np.fmin.reduce(sums, axis=1)
    return np.asarray(np.isnan(highest) | (highest - lowest <= noise))


def is_rounding_error(advantage: float, rewards: Iterable[float]) -> bool:
    """Return which advantages are at most the rounding error of these rewards; NaN counts as one.

    Args:
        advantage (`float`): Rewards divided by their deviation.
        rewards (`Iterable[float]`): All that went into it; NaN does not count.
    """
    largest = max((abs(value) for value in rewards if value == value), default=0.0)
    return not abs(advantage) > min(ADVANTAGE_NOISE * max(1.0, largest), LARGEST_NOISE)
