"""POPO: replay of the newest live groups, with a decoupled loss (arXiv 2606.01281).

The module is the plugin `popo`.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Preset, hookimpl

from ..cards import text_of

SETTINGS = {
    "replay_buffer_size": 16,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "newest",
    "replay_correction": "decoupled",
    "replay_start": 0,
}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "popo",
        SETTINGS,
        "the newest live groups into dead slots, loss clipped around a recent policy",
        text_of("popo"),
    )
