"""What a success is: given, or known from the rewards seen so far. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rewards import NOISE, Bools, Floats, reaches
from .types import Groups

KEPT = 5
"""Different values that are kept: of more, the lowest ones and the highest."""


class Success:
    """The least reward of a success. If none is given, it is known as long as the reward that counts has had two
    values: the higher one passes. All processes see the rewards of all, and say the same.

    Args:
        given (`float`, *optional*): `replay_pass_reward`.
        of (`str`): The reward that counts, in words.

    Attributes:
        of (`str`): The same.
        values (`list[float]`): Different rewards seen so far, in order.
        noise (`float`): Rewards that differ by no more are the same.
    """

    def __init__(self, given: float | None = None, of: str = "") -> None:
        self._given = given
        self.of = of
        self.values: list[float] = []
        self.noise = 0.0

    def note(self, rewards: Floats) -> None:
        """Take note of rewards; NaN is none."""
        seen = rewards[np.isfinite(rewards)]
        self.noise = max(self.noise, NOISE * float(np.abs(seen).max(initial=0.0)))
        values = np.unique(np.append(self.values, seen))
        self.values = values[np.diff(values, prepend=-np.inf) > self.noise].tolist()
        del self.values[KEPT - 1 : -1]

    @property
    def is_graded(self) -> bool:
        """Tell whether rewards have shown that they do not tell what passes."""
        return self._given is None and len(self.values) > 2

    @property
    def least(self) -> float | None:
        """The least reward that passes; None while it is not known."""
        if self._given is None and len(self.values) == 2:
            return sum(self.values) / 2
        return self._given

    def passed(self, groups: Groups) -> Bools:
        """Rows that pass, `(n, G)`: none while it is not known what does."""
        if self.least is None:
            return np.zeros(groups.reward.shape, bool)
        return reaches(groups.reward, self.least)

    def at_lowest(self, groups: Groups) -> Bools:
        """Dead groups at the lowest reward seen, `(n,)`; rows without a reward do not count."""
        return self._all(groups, groups.reward <= min(self.values, default=-np.inf) + self.noise)

    def at_highest(self, groups: Groups) -> Bools:
        """The same at the highest one."""
        return self._all(groups, groups.reward >= max(self.values, default=np.inf) - self.noise)

    def without(self, groups: Groups) -> Bools:
        """Dead groups in which no row passes, `(n,)`; while it is not known what does, those at the lowest reward."""
        if self.least is None:
            return self.at_lowest(groups)
        return self._all(groups, ~reaches(groups.reward, self.least))

    def _all(self, groups: Groups, rows: Bools) -> Bools:
        """Dead groups all of whose scored rows are among these."""
        unscored = groups.unscored
        return np.asarray(groups.dead & (rows | unscored).all(axis=1) & ~unscored.all(axis=1))

    def doubt(self) -> str:
        """Return why it is not known what a success is; nothing where it is."""
        if self.least is not None:
            return ""
        *others, last = [f"{value:.4g}" for value in self.values] or ["none yet"]
        dots = "… " if len(self.values) == KEPT else ""
        seen = f"{', '.join(others)}, {dots}{last}" if others else last
        return f"it is unknown what a success is: the reward that counts ({self.of}) has had the values {seen}"

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {"of": self.of, "values": self.values, "noise": self.noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, unless another reward counts now."""
        if state["of"] == self.of:
            self.values, self.noise = list(state["values"]), state["noise"]
