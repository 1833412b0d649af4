"""Scorers: the priority of a stored group. Each maps [`Groups`] to `(n,)` priorities."""

from __future__ import annotations

import numpy as np

from ..base.validation import number, require, share
from ..data.rewards import pass_rates, reaches
from ..data.types import Context, Floats, Groups
from ..protocols import Scorer


def advantage_std(groups: Groups, context: Context) -> Floats:
    """Σ|advantage| × reward std: the priority of TRL's removed replay trainer (huggingface/trl#4060)."""
    total = np.abs(groups.advantages).sum(axis=1)
    return np.asarray(total * groups.reward_std)


def reward_std(groups: Groups, context: Context) -> Floats:
    """Standard deviation of the weighted rewards."""
    return groups.reward_std


def mean_reward(groups: Groups, context: Context) -> Floats:
    """Mean weighted reward: prefers groups with more successes (as RLEP, arXiv 2507.07451, keeps successes)."""
    return groups.reward_mean


def recency(groups: Groups, context: Context) -> Floats:
    """The number of updates at generation, plus one: newer groups have higher priority."""
    return np.asarray(groups.update + 1.0)


def constant(groups: Groups, context: Context) -> Floats:
    """The same priority for every group, so other columns of the evictor and sampler decide."""
    return np.ones(len(groups))


def make_pass_rate(threshold: float = 0.5, target: float = 0.5) -> Scorer:
    """Prefer groups whose share of rows with a weighted reward ≥ `threshold` is near `target` (ExGRPO, BAPO). A row
    without a gradient is no success; a row that no function scored does not count."""
    require("pass_rate: threshold", threshold, number("a reward"))
    require("pass_rate: target", target, share)

    def pass_rate(groups: Groups, context: Context) -> Floats:
        reward = groups.reward_or_total
        passed = reaches(reward, threshold) & groups.trains
        distance = np.abs(pass_rates(passed, np.isnan(reward)) - target)
        farthest = max(target, 1.0 - target)
        return np.asarray(1.0 - distance / farthest)

    return pass_rate
