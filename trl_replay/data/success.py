"""What a success is: set by the user, or inferred from the rewards seen so far. Imports no torch."""

from __future__ import annotations

import math
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
        noise (`list[float]`): Of each: rewards that differ from it by no more are the same.
    """

    def __init__(self, given: float | None = None, of: str = "") -> None:
        self._given = given
        self.of = of
        self.values: list[float] = []
        self.noise: list[float] = []

    def note(self, rewards: Floats, sizes: Floats) -> None:
        """Record rewards; NaN is ignored.

        Args:
            rewards (`(…)`): The reward that counts, of any rows.
            sizes (`(…)`): Of each what rounding errors grow with: see `reward_sizes`.
        """
        noise_of = dict(zip(self.values, self.noise, strict=True))
        for value, noise in set(zip(rewards.ravel().tolist(), (NOISE * sizes).ravel().tolist(), strict=True)):
            if math.isfinite(value):
                noise_of[value] = max(noise_of.get(value, 0.0), noise)
        self.values, self.noise = [], []
        below, its_noise = -math.inf, 0.0
        for value, noise in sorted(noise_of.items()):
            if not self.values or value - below > max(noise, its_noise):
                self.values.append(value)
                self.noise.append(noise)
            self.noise[-1] = max(self.noise[-1], noise)
            below, its_noise = value, noise
        del self.values[KEPT - 1 : -1]
        del self.noise[KEPT - 1 : -1]

    def begin_anew(self, of: str) -> None:
        """Forget the values: they are of another reward than now, in words."""
        self.of, self.values, self.noise = of, [], []

    @property
    def is_graded(self) -> bool:
        """Whether rewards had too many values to infer what passes."""
        return self._given is None and len(self.values) > 2

    @property
    def least(self) -> float | None:
        """The minimum reward that passes; None while it is unknown."""
        if self._given is None and len(self.values) == 2:
            return sum(self.values) / 2
        return self._given

    def passed(self, groups: Groups) -> Bools:
        """Return the rows that pass, `(n, G)`: none while it is unknown what passes."""
        return self._reaches(groups.reward)

    def _reaches(self, rewards: Floats) -> Bools:
        """Rewards that pass; a threshold between two values needs no tolerance."""
        if self._given is not None:
            return reaches(rewards, self._given)
        return np.asarray(rewards >= (np.inf if self.least is None else self.least))

    def at_lowest(self, groups: Groups) -> Bools:
        """Return the dead groups at the lowest reward seen, `(n,)`; rows without a reward do not count."""
        lowest = self.values[0] + self.noise[0] if self.values else -np.inf
        return self._all(groups, groups.reward <= lowest)

    def at_highest(self, groups: Groups) -> Bools:
        """The same at the highest one."""
        highest = self.values[-1] - self.noise[-1] if self.values else np.inf
        return self._all(groups, groups.reward >= highest)

    def without(self, groups: Groups) -> Bools:
        """Return the dead groups in which no row passes, `(n,)`; while it is unknown what passes, those at the lowest
        reward."""
        if self.least is None:
            return self.at_lowest(groups)
        return self._all(groups, ~self._reaches(groups.reward))

    def _all(self, groups: Groups, rows: Bools) -> Bools:
        """Dead groups all of whose scored rows are among these."""
        unscored = groups.unscored
        return np.asarray(groups.dead & (rows | unscored).all(axis=1) & ~unscored.all(axis=1))

    def doubt(self) -> str:
        """Return why it is unknown what a success is; empty if it is known."""
        if self.least is not None:
            return ""
        *others, last = [f"{value:.4g}" for value in self.values] or ["none yet"]
        dots = "… " if len(self.values) == KEPT else ""
        seen = f"{', '.join(others)}, {dots}{last}" if others else last
        return f"it is unknown what a success is: the reward that counts ({self.of}) has had the values {seen}"

    @property
    def remedy(self) -> str:
        """Which setting to give, of graded rewards."""
        return f"replay_pass_reward={self.values[-1]:.4g}, if the best so far is one"

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {"of": self.of, "values": self.values, "noise": self.noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, unless another reward counts now."""
        if state["of"] == self.of:
            self.values, self.noise = list(state["values"]), list(state["noise"])
