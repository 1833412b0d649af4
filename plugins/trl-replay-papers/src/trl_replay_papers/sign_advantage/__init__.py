"""Sign advantages: +1 for a row that passed and -1 for one that did not, whatever its group did (arXiv 2605.07689).

`sign_advantage` is the plugin, a baseline without any memory.
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


class SignAdvantage:
    """Gives each row the advantage +1 where it passed, and -1 where it did not.

    Args:
        pass_reward (`float`, *optional*, defaults to `0.5`): A row passes with a weighted reward of at least this.
    """

    def __init__(self, pass_reward: float = 0.5) -> None:
        self.pass_reward = finite("SignAdvantage", "pass_reward", pass_reward)

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """Signs; a row that no reward function scored keeps its advantage, and so does a masked one."""
        sign = np.where(reaches(groups.reward, self.pass_reward), 1.0, -1.0)
        return np.where(np.isfinite(groups.reward) & ~groups.masked, sign, groups.advantages)

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        settings = {"replay_buffer_size": 0}
        yield Preset(
            "sign_advantage",
            settings,
            "for comparison: +1 and -1 in the place of advantages",
            text_of("sign_advantage"),
        )


sign_advantage = SignAdvantage()
