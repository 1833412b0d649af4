"""What a training run showed, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

THRESHOLD = 0.25
WINDOW = 50


@dataclass(slots=True)
class Record:
    """One training run, step by step.

    Attributes:
        arm (`str`): Its name in tables.
        seed (`int`): The trainer's seed.
        learning_rate (`float`): Constant over the run.
        settings (`dict`, *optional*): Of [`ReplayConfig`]; None is stock.
        reward (`list[float]`): Mean reward of each step's generated completions, replayed ones not counted.
        dead (`list[float]`): Share of dead groups among the generated ones.
        dead_after (`list[float]`): Share of dead groups among those trained on.
        means (`dict[str, float]`): Mean of each `replay/*` metric over the steps that have it.
        rollouts (`int`): Completions generated.
        rollouts_at (`list[int]`): The same at the end of each step.
        tokens (`int`): Tokens of prompts and completions generated.
        seconds (`float`): Of `trainer.train()`.
        explanation (`str`): `session.explain()`; empty for stock.
    """

    arm: str
    seed: int
    learning_rate: float
    settings: dict[str, Any] | None
    reward: list[float] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)
    dead_after: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    rollouts: int = 0
    rollouts_at: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    explanation: str = ""

    def final(self, steps: int) -> float:
        """Mean reward of the last `steps` steps."""
        return float(np.mean(self.reward[-steps:]))

    def reached(self, threshold: float = THRESHOLD, window: int = WINDOW) -> int | None:
        """Completions generated up to the end of the first `window` steps in a row whose mean reward is at least
        `threshold`; None if there are none."""
        if len(self.reward) < window:
            return None
        weights = np.full(window, 1 / window)
        means = np.convolve(self.reward, weights, mode="valid")
        hits = np.flatnonzero(means >= threshold - 1e-9)
        if len(hits) == 0:
            return None
        last = int(hits[0]) + window - 1
        return self.rollouts_at[last]

    def curve(self, window: int = WINDOW) -> list[float]:
        """Mean reward of each `window` steps, one after the other."""
        means = []
        for start in range(0, len(self.reward), window):
            values = self.reward[start : start + window]
            means.append(float(np.mean(values)))
        return means

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)
