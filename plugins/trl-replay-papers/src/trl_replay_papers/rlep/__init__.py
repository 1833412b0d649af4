"""RLEP: two successes of an earlier run beside each prompt's fresh rows, normalized together (arXiv 2507.07451).

The module is the plugin `rlep`. The pool of successes is the file in `replay_warm_start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import (
    Context,
    EvictorSpec,
    Groups,
    MixerSpec,
    Preset,
    ReplayConfig,
    ScorerSpec,
    Table,
    hookimpl,
    reaches,
)

from ..arguments import at_least, finite
from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Mixer: TypeAlias = Callable[[Table, Ints, Groups, Context], Ints]

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 4096,
    "replay_scorer": "rlep/pool",
    "replay_evictor": "rlep/first",
    "replay_sampler": "same_prompt(by='uniform')",
    "replay_mixer": "rlep/successes",
    "replay_advantages": "joint",
    "replay_selector": "always(share=1.0)",
    "replay_record": "loss",
    "replay_start": 0,
}


def pool(groups: Groups, context: Context) -> NDArray[np.float64]:
    """1 for groups of a file; NaN for what this run generates, so that it is not stored."""
    return np.where(groups.origin > 0, 1.0, np.nan)


def first(table: Table, context: Context) -> NDArray[np.float64]:
    """Keep what came first, where a file has more groups than there is room for."""
    return -table.serial.astype(np.float64)


def make_successes(rows: int = 2, reward: float = 0.5) -> Mixer:
    """Stored successes, drawn evenly, take the places of the slot's worst fresh rows.

    Args:
        rows (`int`, *optional*, defaults to `2`): Most of them a slot.
        reward (`float`, *optional*, defaults to `0.5`): The least weighted reward of a success.
    """
    at_least("successes", "rows", rows, 1)
    finite("successes", "reward", reward)

    def successes(table: Table, drawn: Ints, slots: Groups, context: Context) -> Ints:
        count, size = slots.advantages.shape
        taken = np.full((count, size), -1)
        is_success = reaches(table.row_reward, reward) & table.row_trains
        worst_first = np.argsort(np.nan_to_num(slots.reward_or_total, nan=-np.inf), axis=1, kind="stable")
        for slot, entry in enumerate(drawn[:, 0].tolist()):
            pool = np.flatnonzero(is_success[entry]) if entry >= 0 else np.empty(0, np.int64)
            chosen = context.rng.permutation(pool)[:rows]
            taken[slot, worst_first[slot, : len(chosen)]] = chosen
        return taken

    return successes


@hookimpl
def trl_replay_preflight(trainer: Any, config: ReplayConfig) -> Iterator[str]:
    """The pool comes from a file: that of `rlep`, and that of `luffy`, which has the same scorer."""
    if config.replay_preset and config.strategy("scorer")[0] == "rlep/pool" and config.replay_warm_start is None:
        yield (
            f"The preset {config.replay_preset!r} replays groups of a file alone: set replay_warm_start to one "
            "(`session.export` writes what a run has solved; prompts, completions and rewards are enough)."
        )


@hookimpl
def trl_replay_strategies() -> Iterator[ScorerSpec | EvictorSpec | MixerSpec]:
    """The scorer, the evictor and the mixer."""
    yield ScorerSpec("pool", lambda: pool, "only groups of a file")
    yield EvictorSpec("first", lambda: first, "what came first stays")
    yield MixerSpec("successes", make_successes, "stored successes for the worst fresh rows")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("rlep", SETTINGS, "two successes of a file beside each prompt's fresh rows", text_of("rlep"))
