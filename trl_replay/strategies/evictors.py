"""Evictors: which entries leave a full buffer. Each maps the table to keep ranks; the lowest leave, older ones first
among equals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.table import LARGEST_SCORE, Table
from ..data.types import Context, Floats


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
