"""M2PO: stale groups with the tokens masked that drive up the second moment of log ratios (arXiv 2510.01161).

The module is the plugin `m2po`. The mask itself is the correction of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_replay import Preset, hookimpl

from ..cards import text_of

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 512,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "uniform",
    "replay_correction": "m2po(threshold=0.04)",
    "replay_start": 0,
}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "m2po", SETTINGS, "old groups, without the tokens that moved farthest off the policy", text_of("m2po")
    )
