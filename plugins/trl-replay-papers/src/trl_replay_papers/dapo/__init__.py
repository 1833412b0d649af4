"""DAPO's dynamic sampling: prompts are generated for until the batch is full of live groups (arXiv 2503.14476).

The module is the plugin `dapo`.
"""

from __future__ import annotations

from collections.abc import Iterator

from trl_replay import Preset, hookimpl

from ..cards import text_of

SETTINGS = {"replay_buffer_size": 0, "replay_refill": "new(rounds=10)", "replay_unfilled": "exclude"}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "dapo", SETTINGS, "dead groups are generated again, for new prompts, in up to ten rounds", text_of("dapo")
    )
