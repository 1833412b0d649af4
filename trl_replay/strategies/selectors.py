"""Selectors: which fresh groups may be replaced."""

from __future__ import annotations

import numpy as np

from ..types import Context, Groups, Ints


def zero_std(groups: Groups, context: Context) -> Ints:
    """The dead groups: those whose advantages do not differ beyond float noise."""
    return np.flatnonzero(groups.dead)
