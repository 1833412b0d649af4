"""RL-ZVP: groups of equal rewards train too, up where all passed and down where all failed (arXiv 2509.21880).

`rl_zvp` is the plugin, a baseline without any memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, Groups, Preset, hookimpl, reaches

from ..arguments import finite
from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]


class RlZvp:
    """Gives each row of a group of equal rewards the advantage +alpha where they pass, and -alpha where they fail.

    Args:
        alpha (`float`, *optional*, defaults to `0.1`): Size of these advantages.
        pass_reward (`float`, *optional*, defaults to `0.5`): A group passes with weighted rewards of at least this.
    """

    def __init__(self, alpha: float = 0.1, pass_reward: float = 0.5) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
            raise ConfigurationError(f"RlZvp: alpha={alpha!r} can't be used: give a finite number above 0.")
        self.alpha = alpha
        self.pass_reward = finite("RlZvp", "pass_reward", pass_reward)

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """The batch's advantages, with those of dead groups in the place of 0."""
        scored = np.isfinite(groups.reward) & ~groups.masked
        mean = np.where(scored, groups.reward, 0.0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
        passed = reaches(mean, self.pass_reward)
        shaped = np.where(passed, self.alpha, -self.alpha)[:, None]
        return np.where(groups.dead[:, None] & scored, shaped, groups.advantages)

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        settings = {"replay_buffer_size": 0}
        yield Preset(
            "rl_zvp", settings, "for comparison: dead groups train with advantages of one sign", text_of("rl_zvp")
        )


rl_zvp = RlZvp()
