"""POPO's ablation: the oldest groups instead of the newest, and none that is younger than ten updates
(arXiv 2606.01281).

The module is the plugin `popo_stale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, Preset, SamplerSpec, Table, hookimpl

from ..cards import text_of

Ints: TypeAlias = NDArray[np.int64]
Sampler: TypeAlias = Callable[[Table, int, Context], Ints]

SETTINGS: dict[str, Any] = {
    "replay_buffer_size": 256,
    "replay_scorer": "constant",
    "replay_evictor": "fifo",
    "replay_sampler": "popo_stale/oldest(least_age=10)",
    "replay_correction": "decoupled",
    "replay_start": 0,
}


def make_oldest(least_age: int = 10) -> Sampler:
    """Take the oldest entries, and leave slots empty rather than to take one that is too young.

    Args:
        least_age (`int`, *optional*, defaults to `10`): Updates since a group was generated before it is replayed.
    """
    if isinstance(least_age, bool) or not isinstance(least_age, int) or least_age < 0:
        raise ConfigurationError(
            f"oldest: least_age={least_age!r} can't be used: give a whole number of at least 0, in updates."
        )

    def oldest(table: Table, count: int, context: Context) -> Ints:
        old_enough = np.flatnonzero(context.update - table.update >= least_age)
        by_age = np.argsort(table.serial[old_enough], kind="stable")
        chosen = old_enough[by_age][:count]
        drawn = np.full(count, -1)
        drawn[: len(chosen)] = chosen
        return drawn

    return oldest


@hookimpl
def trl_replay_strategies() -> Iterator[SamplerSpec]:
    """The sampler."""
    yield SamplerSpec("oldest", make_oldest, "the oldest entries, if old enough")


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset(
        "popo_stale", SETTINGS, "for comparison: POPO with groups at least ten updates old", text_of("popo_stale")
    )
