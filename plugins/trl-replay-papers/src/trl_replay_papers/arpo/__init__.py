"""ARPO: one stored success where all of a prompt's fresh rows failed (arXiv 2505.16282).

The module is the plugin `arpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, MixerSpec, Preset, SelectorSpec, Table, hookimpl, reaches

from ..arguments import finite
from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Mixer: TypeAlias = Callable[[Table, Ints, Groups, Context], Ints]
Selector: TypeAlias = Callable[[Groups, Context], Ints]

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 1024,
    "replay_scorer": "constant",
    "replay_evictor": "prompt_balanced",
    "replay_sampler": "same_prompt(by='uniform')",
    "replay_mixer": "arpo/one_success",
    "replay_advantages": "joint",
    "replay_selector": "arpo/failed",
    "replay_record": "loss",
    "replay_start": 0,
}


def make_failed(std: float = 0.05, mean: float = 0.2) -> Selector:
    """Groups whose rewards hardly differ and are low.

    Args:
        std (`float`, *optional*, defaults to `0.05`): Their standard deviation is below this.
        mean (`float`, *optional*, defaults to `0.2`): Their mean is below this.
    """
    finite("failed", "std", std)
    finite("failed", "mean", mean)

    def failed(groups: Groups, context: Context) -> Ints:
        return np.flatnonzero((groups.reward_std < std) & (groups.reward_mean < mean))

    return failed


def make_one_success(reward: float = 0.1) -> Mixer:
    """One stored row, drawn evenly among those above `reward`, takes the place of the first fresh row.

    Args:
        reward (`float`, *optional*, defaults to `0.1`): Its weighted reward is above this, and it trains
            something.
    """
    finite("one_success", "reward", reward)

    def one_success(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        count, size = slots.advantages.shape
        taken = np.full((count, size), -1)
        is_success = np.isfinite(table.row_reward) & ~reaches(-table.row_reward, -reward) & table.row_trains
        for slot, entry in enumerate(drawn[:, 0].tolist()):
            if entry < 0:
                continue
            successes = np.flatnonzero(is_success[entry])
            if len(successes):
                taken[slot, 0] = context.rng.choice(successes)
        return taken

    return one_success


@hookimpl
def trl_replay_strategies() -> Iterator[SelectorSpec | MixerSpec]:
    """The selector and the mixer."""
    yield SelectorSpec("failed", make_failed, "groups of little spread and a low mean")
    yield MixerSpec("one_success", make_one_success, "one stored success for one fresh row")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("arpo", SETTINGS, "one stored success where all of a prompt's rows failed", text_of("arpo"))
