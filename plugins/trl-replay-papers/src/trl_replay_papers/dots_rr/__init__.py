"""DOTS + RR's rollout replay: half of a batch is drawn evenly from the last groups (arXiv 2506.05316).

The module is the plugin `dots_rr`.
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
    "replay_selector": "always(share=0.5)",
    "replay_record": "forward",
    "replay_correction": "ratio",
    "replay_start": 0,
}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "dots_rr", SETTINGS, "half of each batch from the last 512 live groups, drawn evenly", text_of("dots_rr")
    )
