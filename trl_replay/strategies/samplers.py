"""Samplers: which eligible entries are replayed. Each maps the eligible table to distinct row indices."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigurationError
from ..protocols import Sampler
from ..table import Table, draw, lowest
from ..types import Context, Ints


def make_proportional(alpha: float = 1.0) -> Sampler:
    """Draws in proportion to score^alpha (prioritized experience replay, arXiv 1511.05952)."""
    if not 0 <= alpha < float("inf"):
        raise ConfigurationError(f"proportional: alpha={alpha!r} can't be used: give a finite number of at least 0.")

    def proportional(table: Table, count: int, context: Context) -> Ints:
        scores = np.maximum(table.score, 0.0)
        return draw((scores / (scores.max(initial=0.0) or 1.0)) ** alpha, count, context.rng)

    return proportional


def uniform(table: Table, count: int, context: Context) -> Ints:
    """Draws every eligible entry with the same chance."""
    return np.asarray(context.rng.choice(len(table), min(count, len(table)), replace=False))


def top(table: Table, count: int, context: Context) -> Ints:
    """Takes the highest scores; of equal scores the newer."""
    return np.lexsort((-table.serial, -table.score))[:count]


def newest(table: Table, count: int, context: Context) -> Ints:
    """Takes the newest entries."""
    return lowest(-table.serial.astype(np.float64), count)
