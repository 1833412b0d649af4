"""RAGEN-2's filter: of each batch the groups train that hold most of its reward variance (arXiv 2604.06268).

`ragen2` is the plugin, a baseline without any memory. With a buffer, `replay_selector="top_p_variance"`
replaces the other groups instead of leaving them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, Groups, Preset, hookimpl

from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]


class Ragen2:
    """Masks the rows of all groups but the fewest that hold the share `p` of the batch's reward variance.

    Args:
        p (`float`, *optional*, defaults to `0.9`): That share.
    """

    def __init__(self, p: float = 0.9) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1:
            raise ConfigurationError(f"Ragen2: p={p!r} can't be used: give a share above 0 and at most 1.")
        self.p = p

    def kept(self, groups: Groups) -> NDArray[np.bool_]:
        """Which groups train, `(n,)`."""
        variance = np.where(groups.dead, 0.0, groups.reward_std**2)
        order = np.argsort(-variance, kind="stable")
        falling = variance[order]
        before = np.cumsum(falling) - falling
        is_kept = np.zeros(len(groups), bool)
        is_kept[order] = (before < self.p * variance.sum() * (1 - 1e-12)) & (falling > 0)
        return is_kept

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """The batch's advantages, NaN for the groups that are left out."""
        return np.where(self.kept(groups)[:, None], groups.advantages, np.nan)

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
