"""The built-in policies of the buffer: scorers, evictors, samplers, selectors, mixers, each a function of groups or of
the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.validation import choice, number, require, share, unusable, whole
from ..data.rewards import pass_rates, reaches
from ..data.table import LARGEST_SCORE, Table, lowest, weighted_sample
from ..data.types import NONE, Bools, Context, Floats, Groups, Ints
from ..protocols import Mixer, Scorer, Selector


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


def make_pass_rate_scorer(threshold: float = 0.5, target: float = 0.5) -> Scorer:
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


def heap(table: Table, context: Context) -> NDArray[Any]:
    """Keep the highest scores."""
    return table.score


def fifo(table: Table, context: Context) -> NDArray[Any]:
    """Keep the newest groups."""
    return table.serial


def prompt_balanced(table: Table, context: Context) -> NDArray[Any]:
    """Keep equally many groups of every prompt: first the newest ones, then the highest scores.

    So prompts that are solved often can't crowd out the only successes of a hard one. With one group a prompt it is
    `heap`.
    """
    if len(table) == 0:
        return table.score
    score: Floats = table.score
    low, high = score.min(), score.max()
    if low < -LARGEST_SCORE or high > LARGEST_SCORE:  # an infinite span would make NaN of the newest
        score = np.clip(score, -LARGEST_SCORE, LARGEST_SCORE)
        low, high = score.min(), score.max()
    span = high - low + 1.0
    ranks = table.newer * -span
    ranks += score
    return np.asarray(ranks)


def reservoir(table: Table, context: Context) -> NDArray[Any]:
    """Keep a uniform sample of all groups ever offered (Vitter's reservoir, by random tags).

    Uniform as long as only capacity removes entries: age or use limits make it lean to newer groups.
    """
    return table.tag


ALPHA = number("a finite number of at least 0", least=0.0)


class WeightedSampler:
    """Draws in proportion to weights, without replacement. Because the weights are known, `per` can correct for them.

    Args:
        weights (`Callable`): Maps (table, context) to `(len(table),)` numbers of at least 0, of which only the ratios
            matter.
    """

    def __init__(self, weights: Callable[[Table, Context], NDArray[Any]]) -> None:
        self.weights = weights

    def __call__(self, table: Table, count: int, context: Context) -> Ints:
        """Return distinct row indices in draw order."""
        weights = self.weights(table, context)
        return weighted_sample(weights, count, context.rng)


def make_proportional(alpha: float = 1.0) -> WeightedSampler:
    """Draw in proportion to score^alpha (prioritized experience replay, arXiv 1511.05952)."""
    require("proportional: alpha", alpha, ALPHA)

    def weights(table: Table, context: Context) -> Floats:
        return _priorities(table, alpha)

    return WeightedSampler(weights)


def make_prompt_balanced(alpha: float = 1.0) -> WeightedSampler:
    """Draw in proportion to score^alpha / (entries of the same prompt): every prompt gets its turn."""
    require("prompt_balanced: alpha", alpha, ALPHA)

    def weights(table: Table, context: Context) -> Floats:
        return np.asarray(_priorities(table, alpha) / table.peers)

    return WeightedSampler(weights)


uniform = WeightedSampler(lambda table, context: np.ones(len(table)))
uniform.__doc__ = "Draws every eligible entry with the same chance."


def top(table: Table, count: int, context: Context) -> Ints:
    """Take the highest scores; of equal scores the newer."""
    return lowest(-table.score, -table.serial, count)


def newest(table: Table, count: int, context: Context) -> Ints:
    """Take the newest entries."""
    return lowest(-table.serial, table.serial, count)


def least_used(table: Table, count: int, context: Context) -> Ints:
    """Take the entries that were replayed least, among equals by chance: draws go through the buffer in passes.

    A newcomer is drawn first until it has been used as often as the others.
    """
    return lowest(table.uses, context.rng.random(len(table)), count)


class SamePrompt:
    """Draws entries of each slot's own prompt (RePO, arXiv 2506.09340; ExGRPO, arXiv 2510.02245).

    Args:
        entries (`int`): Most entries a slot.
        by (`str`): `"newest"`, `"score"` (the highest) or `"uniform"`.
    """

    same_prompt = True

    def __init__(self, entries: int = 1, by: str = "newest") -> None:
        require("same_prompt: entries", entries, whole(1))
        require("same_prompt: by", by, choice("newest", "score", "uniform"))
        self.entries = entries
        self.by = by

    def __call__(self, table: Table, count: int, context: Context) -> Ints:
        """Return `(count, entries)` rows of the table, -1 where there is none."""
        slots = context.slots
        assert slots is not None  # the session gives them
        left = self._in_order(table, slots.prompt, context)
        drawn = np.full((count, self.entries), -1)
        for slot, prompt in enumerate(slots.prompt[:count].tolist()):
            fitting = np.flatnonzero(table.prompt[left] == prompt)[: self.entries]
            drawn[slot, : len(fitting)] = left[fitting]
            left = np.delete(left, fitting)
        return drawn

    def _in_order(self, table: Table, prompts: Ints, context: Context) -> Ints:
        """Return candidate rows in draw order."""
        rows = np.flatnonzero(np.isin(table.prompt, prompts))
        if self.by == "uniform":
            return context.rng.permutation(rows)
        newest_first = np.argsort(-table.serial[rows], kind="stable")
        if self.by == "score":
            newest_first = np.lexsort((-table.serial[rows], -table.score[rows]))
        return rows[newest_first]


def _priorities(table: Table, alpha: float) -> Floats:
    """Return score^alpha, up to a factor; scores below 0 count as 0."""
    scores: Floats = table.score
    if scores.min(initial=0.0) < 0:
        scores = np.maximum(scores, 0.0)
    if alpha == 1:
        return scores
    highest = scores.max(initial=0.0) or 1.0
    return np.asarray((scores / highest) ** alpha)


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


def make_pass_rate_selector(low: float = 0.125, high: float = 0.875, threshold: float = 0.5) -> Selector:
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


def whole_groups(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
    """Replace the whole slot with the rows of its first entry, in order."""
    size = slots.advantages.shape[1]
    first = (drawn >= 0).argmax(axis=1)
    return np.asarray(first[:, None] * size + np.arange(size))


whole_groups.takes_whole_groups = True  # type: ignore[attr-defined]  # with any other mixer, rows of one prompt must meet


def make_inject(rows: int = 1) -> Mixer:
    """Replace the fresh rows with the lowest rewards by the stored rows with the highest (RLEP, arXiv 2507.07451).

    Args:
        rows (`int`): Most stored rows a slot. A fresh row whose reward is better than the stored one's stays.
    """
    require("inject: rows", rows, whole(1))

    def inject(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        count, size = slots.advantages.shape
        stored = _rewards(table, drawn)
        fresh = np.nan_to_num(slots.reward_or_total, nan=-np.inf)
        best_stored = np.argsort(-stored, axis=1, kind="stable")[:, :rows]
        worst_fresh = np.argsort(fresh, axis=1, kind="stable")[:, :rows]
        most = min(best_stored.shape[1], worst_fresh.shape[1])
        taken = np.full((count, size), NONE)
        for place in range(most):
            source = best_stored[:, place]
            target = worst_fresh[:, place]
            slot = np.arange(count)
            offered = stored[slot, source]
            fits = (offered > -np.inf) & (offered >= fresh[slot, target])
            taken[slot[fits], target[fits]] = source[fits]
        return taken

    return inject


def _rewards(table: Table, drawn: Ints) -> Ints:
    """Return the weighted rewards of all stored rows of each slot, `(n, k * G)`; -inf where there is no row, or none
    with a gradient."""
    entries = table.take(drawn.ravel())
    usable = entries.row_trains & ~np.isnan(entries.row_reward)
    rewards = np.where(usable, entries.row_reward, -np.inf)
    by_entry = rewards.reshape(*drawn.shape, -1)
    known = np.where(drawn[:, :, None] >= 0, by_entry, -np.inf)
    return np.asarray(known.reshape(len(drawn), -1))
