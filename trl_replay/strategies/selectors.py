"""Selectors: which fresh groups may be replaced. Each maps [`Groups`] to distinct indices, most replaceable first."""

from __future__ import annotations

import numpy as np

from ..base.validation import number, require, unusable, whole
from ..data.rewards import pass_rates, reaches
from ..data.types import Bools, Context, Floats, Groups, Ints
from ..protocols import Selector

SHARE = number("a share above 0 and at most 1", above=0.0, most=1.0)
ALWAYS_SHARE = 0.25


def zero_std(groups: Groups, context: Context) -> Ints:
    """Select dead groups: those whose advantages do not differ beyond float noise."""
    return np.flatnonzero(groups.dead)


zero_std.only_dead = True  # type: ignore[attr-defined]  # live groups stay in the batch, whose loss shows log-probs


def make_low_std(threshold: float = 0.05) -> Selector:
    """Select dead groups, and live ones with a small reward standard deviation.

    Args:
        threshold (`float`): Largest standard deviation of the weighted reward that is replaceable (0.05 in ARPO,
            arXiv 2505.16282).
    """
    require("low_std: threshold", threshold, number("a number of at least 0", least=0.0))

    def low_std(groups: Groups, context: Context) -> Ints:
        std = groups.reward_std
        return _ordered(groups, std, groups.dead | (std <= threshold))

    return low_std


def make_min_range(threshold: float = 0.02) -> Selector:
    """Select dead groups, and live ones whose rewards are so close that normalization amplifies noise (near-ties,
    modelscope/twinkle#288).

    Args:
        threshold (`float`): A group stays if its highest and lowest rewards differ by at least this.
    """
    require("min_range: threshold", threshold, number("a number of at least 0", least=0.0))

    def min_range(groups: Groups, context: Context) -> Ints:
        reward = groups.reward_or_total
        highest = np.where(np.isnan(reward), -np.inf, reward).max(axis=1)
        lowest = np.where(np.isnan(reward), np.inf, reward).min(axis=1)
        return _ordered(groups, highest - lowest, groups.dead | (highest - lowest < threshold))

    return min_range


def make_min_nontrivial(count: int = 2, tolerance: float = 0.01) -> Selector:
    """Select dead groups, and live ones in which too few rewards differ from the mean (modelscope/twinkle#288).

    Args:
        count (`int`): A group stays if it has so many of them.
        tolerance (`float`): A reward differs if it is farther than this from the group's mean.
    """
    require("min_nontrivial: count", count, whole(1))
    require("min_nontrivial: tolerance", tolerance, number("a number of at least 0", least=0.0))

    def min_nontrivial(groups: Groups, context: Context) -> Ints:
        differing = (np.abs(groups.reward_or_total - groups.reward_mean[:, None]) > tolerance).sum(axis=1)
        return _ordered(groups, differing.astype(np.float64), groups.dead | (differing < count))

    return min_nontrivial


def make_top_p_variance(p: float = 0.9) -> Selector:
    """Select all but the smallest set of groups that holds the share `p` of the reward variance (RAGEN-2, arXiv
    2604.06268)."""
    require("top_p_variance: p", p, SHARE)

    def top_p_variance(groups: Groups, context: Context) -> Ints:
        variance = np.where(groups.dead, 0.0, groups.reward_std**2)
        order = np.argsort(-variance, kind="stable")
        falling = variance[order]
        before = np.cumsum(falling) - falling  # the variance of all groups with more
        needed = p * variance.sum() * (1 - 1e-12)
        kept = order[(before < needed) & (falling > 0)]
        replaceable = np.ones(len(groups), bool)
        replaceable[kept] = False
        return _ordered(groups, variance, replaceable)

    return top_p_variance


def make_pass_rate(low: float = 0.125, high: float = 0.875, threshold: float = 0.5) -> Selector:
    """Select dead groups, and those whose pass rate is not strictly between `low` and `high` (BAPO, arXiv 2602.20722).

    Args:
        low (`float`): Pass rates up to this one are too hard.
        high (`float`): Pass rates from this one on are too easy.
        threshold (`float`): A row passes with a weighted reward of at least this.
    """
    if not 0 <= low < high <= 1:
        raise unusable("pass_rate: low", low, f"give 0 <= low < high <= 1, where high={high!r}")

    def pass_rate(groups: Groups, context: Context) -> Ints:
        rate = pass_rates(reaches(groups.reward, threshold), groups.unscored)
        is_rated = ~groups.unscored.all(axis=1)
        replaceable = groups.dead | (is_rated & ((rate <= low) | (rate >= high)))
        return _ordered(groups, groups.reward_std, replaceable)

    return pass_rate


def make_always(share: float = ALWAYS_SHARE) -> Selector:
    """Select a fixed share of every batch, rounded down: dead groups first, then those with the lowest reward
    deviation."""
    require("always: share", share, SHARE)

    def always(groups: Groups, context: Context) -> Ints:
        count = int(share * len(groups) + 1e-9)
        everything = np.ones(len(groups), bool)
        return _ordered(groups, groups.reward_std, everything)[:count]

    return always


def _ordered(groups: Groups, worth: Floats, chosen: Bools) -> Ints:
    """Return the chosen groups: dead ones first, then by ascending worth; ties keep their order."""
    order = np.lexsort((worth, ~groups.dead))
    is_chosen = chosen[order]
    return np.asarray(order[is_chosen])
