"""LUFFY: a stronger model's trace beside each prompt's fresh rows, with a shaped ratio (arXiv 2504.14945).

The module is the plugin `luffy`. The traces are the file in `replay_warm_start`; the strategies are those of `rlep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_replay import Preset, hookimpl

from ..cards import text_of

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 4096,
    "replay_scorer": "rlep/pool",
    "replay_evictor": "rlep/first",
    "replay_sampler": "same_prompt",
    "replay_mixer": "rlep/successes(rows=1)",
    "replay_advantages": "joint",
    "replay_selector": "always(share=1.0)",
    "replay_record": "loss",
    "replay_correction": "shaped(gamma=0.1)",
    "replay_warm_start_short": "resample",
    "replay_start": 0,
}


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "luffy", SETTINGS, "a stronger model's completion beside fresh ones, with a shaped ratio", text_of("luffy")
    )
