"""Samplers: which eligible entries are replayed. Each maps the eligible table to distinct row indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.validation import choice, number, require, whole
from ..data.table import Table, lowest, weighted_sample
from ..data.types import Context, Floats, Ints

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
