"""RAGEN-2's filter: of each batch the groups train that hold most of its reward variance (arXiv 2604.06268).

`ragen2` is the plugin, a baseline without any memory. With a buffer, `replay_selector="top_p_variance"`
replaces the other groups instead of leaving them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import Context, Groups, Preset, hookimpl
from trl_replay.strategies.policies import make_top_p_variance

from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]


class Ragen2:
    """Masks the rows of all groups but the fewest that hold the share `p` of the batch's reward variance.

    Args:
        p (`float`, *optional*, defaults to `0.9`): That share.
    """

    def __init__(self, p: float = 0.9) -> None:
        self.p = p
        self._others = make_top_p_variance(p)  # the same rule as a selector

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """The batch's advantages, NaN for the groups that are left out."""
        shaped = groups.advantages.copy()
        shaped[self._others(groups, context)] = np.nan
        return shaped

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        yield Preset(
            "ragen2",
            {"replay_buffer_size": 0},
            "only the groups train that hold 0.9 of the reward variance",
            text_of("ragen2"),
        )


ragen2 = Ragen2()
