"""Advantage-based prioritised replay of rows, forgotten after ten updates (adv-PER, arXiv 2606.04560).

The module is the plugin `adv_per`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, MixerSpec, Preset, SamplerSpec, Table, hookimpl, weighted_sample

from ..arguments import above, at_least
from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

EPSILON = 1e-6
SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 4096,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "adv_per/groups",
    "replay_mixer": "adv_per/rows",
    "replay_advantages": "stored",
    "replay_correction": "ratio",
    "replay_max_weight": 10.0,
    "replay_max_age": 10,
    "replay_max_fraction": 0.5,
    "replay_unfilled": "exclude",
    "replay_start": 20,
}


def priorities(table: Table, alpha: float) -> Floats:
    """(|A| + 1e-6)^alpha of each stored row, `(len(table), G)`; 0 for one that trains nothing."""
    size = np.abs(np.nan_to_num(table.row_advantage.astype(np.float64)))
    return np.where(table.row_trains, (size + EPSILON) ** alpha, 0.0)


class GroupsOfRows:
    """Draws the groups whose rows may be taken, in proportion to the sum of their priorities.

    Args:
        alpha (`float`, *optional*, defaults to `0.5`): Exponent of |A|.
        entries (`int`, *optional*, defaults to `2`): Groups a slot; the mixer then draws their rows.
    """

    def __init__(self, alpha: float = 0.5, entries: int = 2) -> None:
        self.alpha = above("groups", "alpha", alpha, 0)
        self.entries = at_least("groups", "entries", entries, 1)

    def __call__(self, table: Table, count: int, context: Context) -> Ints:
        """`(count, entries)` distinct rows of the table, -1 where there are too few."""
        weights = priorities(table, self.alpha).sum(axis=1)
        chosen = weighted_sample(weights, min(count * self.entries, len(table)), context.rng)
        drawn = np.full(count * self.entries, -1)
        drawn[: len(chosen)] = chosen
        return np.asarray(drawn.reshape(self.entries, count).T)  # every slot gets one before any gets two


class Rows:
    """Fills a slot with rows of its groups, drawn without replacement in proportion to their priorities.

    Args:
        alpha (`float`, *optional*, defaults to `0.5`): Exponent of |A|.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = above("rows", "alpha", alpha, 0)

    def __call__(self, table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        """`(n, G)`: which of the drawn groups' rows take the slot's."""
        count, size = slots.advantages.shape
        taken = np.full((count, size), -1)
        of_rows = priorities(table, self.alpha)
        for slot in range(count):
            known = np.flatnonzero(np.repeat(drawn[slot] >= 0, size))
            weights = of_rows[drawn[slot][known // size], known % size]
            chosen = known[weighted_sample(weights, min(size, int((weights > 0).sum())), context.rng)]
            taken[slot, : len(chosen)] = chosen
        return taken


@hookimpl
def trl_replay_strategies() -> Iterator[SamplerSpec | MixerSpec]:
    """The sampler and the mixer, which belong together."""
    yield SamplerSpec("groups", GroupsOfRows, "groups in proportion to their rows' |A|^alpha")
    yield MixerSpec("rows", Rows, "rows of any prompt in proportion to |A|^alpha")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("adv_per", SETTINGS, "rows in proportion to |advantage|^0.5, for ten updates", text_of("adv_per"))
