"""What a run came to, by its log: where the reward that counts began and ended, and after how many completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .logged import COUNTED_STEP, DEAD, ROLLOUTS, SUM, Log, at_ends, functions, is_number, judged_by, numbers, steps

NOT_EVALUATED = "the log does not show whether it learned, as nothing was evaluated"
MOST_TOLD = 4
"""Reward functions that are told one by one, where none is named."""


class Outcome(NamedTuple):
    """Where a run began and ended.

    Attributes:
        name (`str`): The reward function that counts, or [`SUM`].
        key (`str`): It in the log.
        first, last (`float`): Its means over the first and the last steps.
        width (`int`): How many steps these are.
        best (`float`): The highest mean over as many steps.
        steps (`int`): Logged steps.
        updates (`float`): The last one; 0 for a log that names no steps.
        completions (`float`, *optional*): Generated, where the log counts them from its first step on.
        generated_once (`bool`): Whether further steps trained on stored groups, and none generated.
        parts (`Sequence[Outcome]`): The functions of a sum of several.
        evaluated (`Sequence[float]`): Its values on evaluation prompts.
        sample (`Sequence[float]`): Effective sample sizes of what was replayed, as shares.
        error (`float`): Standard error of such a mean, by how far values of adjacent steps differ.
    """

    name: str
    key: str
    first: float
    last: float
    width: int
    best: float
    steps: int
    updates: float
    completions: float | None
    generated_once: bool = False
    parts: Sequence[Outcome] = ()
    evaluated: Sequence[float] = ()
    sample: Sequence[float] = ()
    error: float = 0.0

    @property
    def rose(self) -> bool:
        """Whether it ended higher than it began: on evaluation prompts, if nothing else tells."""
        if self.generated_once:
            return len(self.evaluated) > 1 and self.evaluated[-1] > self.evaluated[0]
        return self.last > self.first

    def __str__(self) -> str:
        if self.generated_once:
            return self._of_stored_groups
        if self.steps == 1:
            return f"{self.name} {self.last:.2g} in the one logged step"
        parts = "; ".join(part.way for part in self.parts)
        way = f"{self.way} ({parts})" if parts else self.way
        after = f"{self.updates:,.0f} updates" if self.updates else f"{self.steps} logged steps"
        if self.completions is not None:
            after = f"{self.completions:,.0f} completions, {after}"
        text = f"{way} over {after} (means of the first and last {self.width} of {self.steps} logged steps)"
        if len(self.evaluated) > 1:
            text += f"; on evaluation prompts {_way(self.evaluated)}"
        return text

    @property
    def _of_stored_groups(self) -> str:
        """What there is to tell of a run whose updates generate nothing."""
        generated = "one batch" if self.completions is None else f"{self.completions:,.0f} completions"
        text = f"{self.updates:,.0f} updates, and {generated} generated ({self.name} {self.last:.2g})"
        told = f"{self.name} on evaluation prompts {_way(self.evaluated)}" if self.evaluated else NOT_EVALUATED
        sample = f"; effective sample size {_way(self.sample)}" if self.sample else ""
        return f"{told}; {text}{sample}"

    @property
    def way(self) -> str:
        """From where to where."""
        return f"{self.name} {_way([self.first, self.last])}"


def _way(values: Sequence[float]) -> str:
    return f"{values[0]:.2g} → {values[-1]:.2g}" if len(values) > 1 else f"{values[0]:.2g}"


def outcome_of(log: Log, reward: str | None = None) -> Outcome | None:
    """Return where a run began and ended; None where it logged no reward.

    Args:
        log (`Log`): Of a run with or without replay.
        reward (`str`, *optional*): The function that counts; if not given, the one that the log names.
    """
    entries = steps(log)
    name = reward or judged_by(entries) or SUM
    key = f"rewards/{name}/mean"
    if not numbers(entries, key):
        name, key = SUM, SUM
    found = _of(entries, name, key)
    if found is not None:
        found = found._replace(evaluated=numbers(log, f"eval_{key}"))
        without = [entry for entry in log if "loss" in entry and DEAD not in entry and is_number(entry.get("step"))]
        if found.steps == 1 and found.updates and without:
            sample = numbers(log, "replay/ess")
            found = found._replace(generated_once=True, updates=without[-1]["step"], sample=sample)
    names = functions(entries)
    if found is None or name != SUM or not 1 < len(names) <= MOST_TOLD:
        return found
    parts = [part for each in names if (part := _of(entries, each, f"rewards/{each}/mean"))]
    return found._replace(parts=parts)


def _of(entries: Log, name: str, key: str) -> Outcome | None:
    told = [entry for entry in entries if is_number(entry.get(key))]
    if not told:
        return None
    values = numbers(told, key)
    width = at_ends(len(values))
    first, last = (sum(part) / width for part in (values[:width], values[-width:]))
    sums = np.cumsum([0.0, *values])
    best = float((sums[width:] - sums[:-width]).max()) / width
    rollouts = told[-1].get(ROLLOUTS) if is_number(told[0].get(ROLLOUTS)) else None
    completions = rollouts if is_number(rollouts) else None
    updates = 0 if COUNTED_STEP in told[-1] else told[-1]["step"]
    variance = float(np.mean(np.diff(values) ** 2)) / 2 if len(values) > 1 else 0.0
    error = (variance / width) ** 0.5
    return Outcome(name, key, first, last, width, best, len(values), updates, completions, error=error)
