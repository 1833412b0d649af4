"""Experience replay of FAIR's study: a FIFO buffer that is drawn from evenly (arXiv 2604.08706).

The module is the plugin `fair_er`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trl_replay import Context, EvictorSpec, Preset, Table, hookimpl, reaches
from trl_replay.protocols import Evictor

from ..arguments import finite, fraction
from ..cards import text_of

SETTINGS = {
    "replay_iterations": "replay",
    "replay_buffer_size": 64,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "uniform",
    "replay_correction": "ratio",
    "replay_start": 0,
}


def make_keep_right(share: float = 0.5, least: float = 0.5, threshold: float = 0.5) -> Evictor:
    """Keep the newest groups, and in `share` of the buffer's places the newest right ones that are older.

    Places that right groups don't need are the newest others'.

    Args:
        share (`float`): Of the buffer's capacity, from 0 (first in, first out) to 1.
        least (`float`): A group is right if at least this share of its scored rows is, from 0 to 1.
        threshold (`float`): A row is right if its reward is at least this.
    """
    share = fraction("keep_right", "share", share)
    least = fraction("keep_right", "least", least)
    threshold = finite("keep_right", "threshold", threshold)

    def keep_right(table: Table, context: Context) -> np.ndarray:
        place = np.argsort(np.argsort(-table.serial))  # 0 is the newest
        newest = place < round((1 - share) * context.capacity)
        scored = np.isfinite(table.row_reward).sum(axis=1)
        right = reaches(table.row_reward, threshold).sum(axis=1) >= np.maximum(least * scored, 1)
        return (2 * newest + (right & ~newest)) * len(table) - place

    return keep_right


@hookimpl
def trl_replay_strategies() -> Iterator[EvictorSpec]:
    """The evictor."""
    yield EvictorSpec("keep_right", make_keep_right, "fifo, but for a share that the newest right groups keep")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "fair_er", SETTINGS, "more updates a completion, on the last 64 live groups, drawn evenly", text_of("fair_er")
    )
