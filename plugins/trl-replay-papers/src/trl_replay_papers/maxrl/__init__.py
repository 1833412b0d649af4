"""MaxRL: a success counts the more the fewer its group has, N / K − 1 (arXiv 2602.02710).

`maxrl` is the plugin; it has no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, Preset, hookimpl, reaches

from ..arguments import finite
from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]


class MaxRL:
    """Gives each row of a group with K successes among N scored rows the advantage N r / K − 1, with r = 1 for a
    success and 0 for a failure; 0 where K = 0.

    Args:
        pass_reward (`float`, *optional*, defaults to `0.5`): A success has a weighted reward of at least this.
    """

    def __init__(self, pass_reward: float = 0.5) -> None:
        self.pass_reward = finite(type(self).__name__, "pass_reward", pass_reward)

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """Advantages of the batch; a row that no reward function scored keeps its own, and so does a masked one."""
        scored = np.isfinite(groups.reward) & ~groups.masked
        success = reaches(groups.reward, self.pass_reward) & scored
        successes = success.sum(axis=1, keepdims=True)
        gains = scored.sum(axis=1, keepdims=True) * success / np.maximum(successes, 1) - 1.0
        return np.where(scored, np.where(successes > 0, gains, 0.0), groups.advantages)

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        yield Preset(
            "maxrl", {"replay_buffer_size": 0}, "a success counts N / K − 1, of K among N rows", text_of("maxrl")
        )


maxrl = MaxRL()
