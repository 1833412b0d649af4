"""Experience replay of FAIR's study: a FIFO buffer that is drawn from evenly (arXiv 2604.08706).

The module is the plugin `fair_er`.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Preset, hookimpl

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


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "fair_er", SETTINGS, "more updates a completion, on the last 64 live groups, drawn evenly", text_of("fair_er")
    )
