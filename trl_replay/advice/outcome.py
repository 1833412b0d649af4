"""What a run came to, by its log: where the reward that counts began and ended, and after how many completions."""

from __future__ import annotations

from typing import NamedTuple

from .logged import COUNTED_STEP, ROLLOUTS, SUM, Log, at_ends, functions, is_number, judged_by, numbers, steps

MOST_TOLD = 4
"""Reward functions that are told one by one, where none is named."""


class Outcome(NamedTuple):
    """Where a run began and ended.

    Attributes:
        name (`str`): The reward function that counts, or [`SUM`].
        key (`str`): It in the log.
        first, last (`float`): Its means over the first and the last steps.
        width (`int`): How many steps these are.
        steps (`int`): Logged steps.
        updates (`float`): The last one; 0 for a log that names no steps.
        completions (`float`, *optional*): Generated, where the log counts them from its first step on.
        parts (`list[Outcome]`): The functions of a sum of several.
        evaluated (`tuple[float, float]`, *optional*): The first and the last value on evaluation prompts.
    """

    name: str
    key: str
    first: float
    last: float
    width: int
    steps: int
    updates: float
    completions: float | None
    parts: list[Outcome]
    evaluated: tuple[float, float] | None

    @property
    def rose(self) -> bool:
        """Whether it ended higher than it began."""
        return self.last > self.first

    def __str__(self) -> str:
        if self.steps == 1:
            return f"{self.name} {self.last:.2g} in the one logged step"
        parts = "; ".join(part.way for part in self.parts)
        way = f"{self.way} ({parts})" if parts else self.way
        after = f"{self.updates:,.0f} updates" if self.updates else f"{self.steps} logged steps"
        if self.completions is not None:
            after = f"{self.completions:,.0f} completions, {after}"
        text = f"{way} over {after} (means of the first and last {self.width} of {self.steps} logged steps)"
        if self.evaluated is not None:
            text += f"; on evaluation prompts {_way(*self.evaluated)}"
        return text

    @property
    def way(self) -> str:
        """From where to where."""
        return f"{self.name} {_way(self.first, self.last)}"


def _way(first: float, last: float) -> str:
    return f"{first:.2g} → {last:.2g}"


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
    evaluated = numbers(log, f"eval_{key}")
    if found is not None and len(evaluated) > 1:
        found = found._replace(evaluated=(evaluated[0], evaluated[-1]))
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
    rollouts = told[-1].get(ROLLOUTS) if is_number(told[0].get(ROLLOUTS)) else None
    completions = rollouts if is_number(rollouts) else None
    updates = 0 if COUNTED_STEP in told[-1] else told[-1]["step"]
    return Outcome(name, key, first, last, width, len(values), updates, completions, [], None)
