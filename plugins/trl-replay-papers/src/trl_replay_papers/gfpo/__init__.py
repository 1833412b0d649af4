"""GFPO: of the completions of a group the k best by some measure train, normalized among themselves
(arXiv 2508.09726).

`gfpo` is the plugin, with the shortest half; it has no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trl_replay import ConfigurationError, Context, Groups, Preset, ReplayConfig, hookimpl

from ..arguments import at_least
from ..cards import text_of

Floats: TypeAlias = NDArray[np.float64]

MEASURES = ("length", "efficiency")
EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


class Gfpo:
    """Trains on k completions of each group: the shortest, or those of the highest reward a token.

    Args:
        keep (`int`, *optional*): k; half of a group if not given.
        by (`str`, *optional*, defaults to `"length"`): `"length"`, or `"efficiency"`, reward over length.
    """

    def __init__(self, keep: int | None = None, by: str = "length") -> None:
        self.keep = keep if keep is None else at_least("Gfpo", "keep", keep, 2)
        if by not in MEASURES:
            raise ConfigurationError(f"Gfpo: by={by!r} can't be used: give one of {', '.join(MEASURES)}.")
        self.by = by

    @hookimpl
    def trl_replay_preflight(self, trainer: Any, config: ReplayConfig) -> Iterator[str]:
        """Two kept rows are the least that can be normalized among themselves."""
        size = trainer.num_generations
        if self.keep is None and size // 2 < 2:
            yield (
                f"'gfpo' keeps half of a group, with num_generations={size} a single completion, which has none to "
                "be compared with: use num_generations of 4 or more, or register Gfpo(keep=2)."
            )
        elif self.keep is not None and self.keep > size:
            yield f"Gfpo(keep={self.keep}) keeps more than num_generations={size} completions: lower keep."

    @hookimpl
    def trl_replay_advantages(self, groups: Groups, context: Context) -> Floats:
        """Advantages of the kept rows among themselves, NaN for the others."""
        size = groups.advantages.shape[1]
        count = size // 2 if self.keep is None else self.keep
        total = np.where(groups.masked, np.nan, groups.total)  # as TRL's advantages, whichever function counts
        first = groups.lengths if self.by == "length" else -total / np.maximum(groups.lengths, 1)
        kept = np.argsort(np.where(np.isnan(total), np.inf, first), axis=1, kind="stable")[:, :count]
        reward = np.take_along_axis(total, kept, axis=1)
        scored = np.isfinite(reward).sum(axis=1, keepdims=True)  # may be none
        centered = reward - np.nansum(reward, axis=1, keepdims=True) / np.maximum(scored, 1)
        squares = np.nansum(centered**2, axis=1, keepdims=True)
        deviation = np.sqrt(squares / np.maximum(scored - 1, 1))
        shaped = np.full(groups.advantages.shape, np.nan)
        np.put_along_axis(shaped, kept, centered / (deviation + EPSILON), axis=1)
        return shaped

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """The preset."""
        yield Preset(
            "gfpo",
            {"replay_buffer_size": 0},
            "the shortest half of each group, normalized among themselves",
            text_of("gfpo"),
        )


gfpo = Gfpo()
