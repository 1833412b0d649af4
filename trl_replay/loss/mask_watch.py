"""A watch over what corrections and gates leave of the replayed rows."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping

from ..advice.rules import DRIFT, GATED

UPDATES, NEARLY_ALL = 8, 0.95
"""Updates with replayed rows, and the share of these rows without any weight at which it is told."""


class MaskWatch:
    """Warns once where nearly all replayed rows of several updates were masked.

    Args:
        told (`str`): What masks them, and the remedy; empty where that is meant.
    """

    def __init__(self, told: str) -> None:
        self._told = told
        self._shares: deque[float] = deque(maxlen=UPDATES)
        self._has_warned = not told

    def __call__(self, measured: Mapping[str, float]) -> None:
        """Take note of an update's metrics; those without replayed rows tell nothing."""
        if self._has_warned or GATED not in measured:
            return
        self._shares.append(measured[GATED])
        share = sum(self._shares) / UPDATES
        if share >= NEARLY_ALL:
            self._has_warned = True
            drift = measured.get(DRIFT, 0.0)
            warnings.warn(
                f"Of the rows replayed in {UPDATES} updates, {share:.0%} were masked, so that replay teaches nothing "
                f"(mean |log ratio|: {drift:.2g}): {self._told}",
                stacklevel=2,
            )
