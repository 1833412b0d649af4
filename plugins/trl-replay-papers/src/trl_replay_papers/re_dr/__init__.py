"""Re:Dr: imitation of other prompts' stored successes beside fresh rows with Dr. GRPO's advantages (remax-rl 0.1.1).

The module is the plugin `re_dr`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_replay import Preset, ReplayConfig, hookimpl

from ..cards import text_of

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 1024,
    "replay_scorer": "constant",
    "replay_evictor": "prompt_balanced",
    "replay_sampler": "prompt_balanced",
    "replay_correction": "imitation",
    "replay_start": 0,
}


@hookimpl
def trl_replay_preflight(trainer: Any, config: ReplayConfig) -> Iterator[str]:
    """Dr. GRPO's advantages are not divided by a deviation."""
    scaled = trainer.args.scale_rewards
    if config.replay_preset == "re_dr" and scaled not in ("none", False):
        yield f"The preset 're_dr' goes with Dr. GRPO's advantages: set scale_rewards='none' instead of {scaled!r}."


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("re_dr", SETTINGS, "imitation of stored successes beside Dr. GRPO's advantages", text_of("re_dr"))
