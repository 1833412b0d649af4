"""Filtering alone: dead groups train nothing and count in no mean.

The module is the plugin `filter`, a baseline without any memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Preset, hookimpl

from ..cards import text_of

SETTINGS = {"replay_buffer_size": 0, "replay_unfilled": "exclude"}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "filter",
        SETTINGS,
        "for comparison: dead groups are left out of the loss, and nothing replaces them",
        text_of("filter"),
    )
