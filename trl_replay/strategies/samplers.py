"""Samplers: which eligible entries are replayed. Each maps the eligible table to distinct row indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..table import Table, lowest, weighted_sample
from ..types import Context, Floats, Ints


class WeightedSampler:
    """Draws in proportion to weights, without replacement. Because the weights are known, `per` can correct for them.

    Args:
        weights (`Callable`): Maps (table, context) to `(len(table),)` numbers of at least 0, of which only the ratios
            matter.
    """

    def __init__(
        self,
        weights: Callable[[Table, Context], NDArray[Any]],
    ) -> None:
        self.weights = weights

    def __call__(self, table: Table, count: int, context: Context) -> Ints:
        """Distinct row indices, the first drawn first."""
        weights = self.weights(table, context)
        return weighted_sample(weights, count, context.rng)


def make_proportional(alpha: float = 1.0) -> WeightedSampler:
    """Draws in proportion to score^alpha (prioritized experience replay, arXiv 1511.05952)."""
    _require_alpha("proportional", alpha)

    def weights(table: Table, context: Context) -> Floats:
        return _priorities(table, alpha)

    return WeightedSampler(weights)


def make_prompt_balanced(alpha: float = 1.0) -> WeightedSampler:
    """Draws in proportion to score^alpha / (entries of the same prompt): every prompt gets its turn."""
    _require_alpha("prompt_balanced", alpha)

    def weights(table: Table, context: Context) -> Floats:
        return np.asarray(_priorities(table, alpha) / np.maximum(table.peers, 1))

    return WeightedSampler(weights)


uniform = WeightedSampler(lambda table, context: np.ones(len(table)))
"""Draws every eligible entry with the same chance."""


def top(table: Table, count: int, context: Context) -> Ints:
    """Takes the highest scores; of equal scores the newer."""
    return np.lexsort((-table.serial, -table.score))[:count]


def newest(table: Table, count: int, context: Context) -> Ints:
    """Takes the newest entries."""
    return lowest(-table.serial.astype(np.float64), count)


def _priorities(table: Table, alpha: float) -> Floats:
    """score^alpha, up to a factor; scores below 0 count as 0."""
    scores: Floats = np.maximum(table.score, 0.0)
    if alpha == 1:
        return scores
    highest = scores.max(initial=0.0) or 1.0
    return np.asarray((scores / highest) ** alpha)


def _require_alpha(sampler: str, alpha: float) -> None:
    if not 0 <= alpha < float("inf"):
        raise ConfigurationError(f"{sampler}: alpha={alpha!r} can't be used: give a finite number of at least 0.")
