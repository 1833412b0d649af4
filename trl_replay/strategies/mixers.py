"""Mixers: which stored rows replace which rows of a slot. Each maps what was drawn to `(n, G)` stored rows, or -1."""

from __future__ import annotations

import numpy as np

from ..base import validation
from ..data.table import Table
from ..data.types import NONE, Context, Groups, Ints
from ..protocols import Mixer


def whole(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
    """Replace the whole slot with the rows of its first entry, in order."""
    size = slots.advantages.shape[1]
    first = (drawn >= 0).argmax(axis=1)
    return np.asarray(first[:, None] * size + np.arange(size))


whole.takes_whole_groups = True  # type: ignore[attr-defined]  # with any other mixer, rows of one prompt must meet


def make_inject(rows: int = 1) -> Mixer:
    """Replace the fresh rows with the lowest rewards by the stored rows with the highest (RLEP, arXiv 2507.07451).

    Args:
        rows (`int`): Most stored rows a slot. A fresh row whose reward is better than the stored one's stays.
    """
    validation.require("inject: rows", rows, validation.whole(1))

    def inject(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        count, size = slots.advantages.shape
        stored = _rewards(table, drawn)
        fresh = np.nan_to_num(slots.reward_or_total, nan=-np.inf)
        best_stored = np.argsort(-stored, axis=1, kind="stable")[:, :rows]
        worst_fresh = np.argsort(fresh, axis=1, kind="stable")[:, :rows]
        most = min(best_stored.shape[1], worst_fresh.shape[1])
        taken = np.full((count, size), NONE)
        for number in range(most):
            source = best_stored[:, number]
            target = worst_fresh[:, number]
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
