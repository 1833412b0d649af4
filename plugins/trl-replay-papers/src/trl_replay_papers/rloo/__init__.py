"""RLOO: each row's reward minus the mean of its group's others (arXiv 2402.14740).

The module is the plugin `rloo`; it has no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, Preset, hookimpl

from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]


@hookimpl
def trl_replay_advantages(groups: Groups, context: Context) -> Floats:
    """Advantages of the batch; a row that no function scored, or alone in that, keeps its own, and so does a masked
    one."""
    left = groups.failed | groups.masked
    rewards = np.where(left, 0.0, groups.total)
    others = (~left).sum(axis=1, keepdims=True) - 1
    baseline = (rewards.sum(axis=1, keepdims=True) - rewards) / np.maximum(others, 1)
    return np.where(left | (others < 1), groups.advantages, rewards - baseline)


@hookimpl
def trl_replay_presets() -> Iterator[Preset]:
    """The preset."""
    yield Preset("rloo", {"replay_buffer_size": 0}, "the reward minus the mean of the others'", text_of("rloo"))
