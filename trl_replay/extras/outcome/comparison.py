"""Runs side by side: what each took to the end of the first, and what became of it there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ...errors import ReplayError
from .outcome import Outcome
from .run import AXES, SUM, Run

ENOUGH = 3
"""Runs of each label without which nothing is proven."""
UNPROVEN = (
    f"This proves nothing yet: seeds of one setting can differ as much as settings do. Train each setting with at "
    f"least {ENOUGH} seeds, better 5, on as many completions, at a learning rate chosen for it on other seeds, and "
    "give runs of one setting one label: label=folder."
)


def outcomes_of(runs: Sequence[Run], reward: str | None = None) -> list[Outcome]:
    """Return the outcomes of runs by one reward function.

    Args:
        runs (`Sequence[Run]`): At least one.
        reward (`str`, *optional*): The function that counts, or another logged metric; if not given, the runs'
            `replay_reward`, or else the sum.

    Raises:
        ReplayError: A run did not log it, or the runs name several.
    """
    named = sorted({run.counts for run in runs if run.counts})
    if reward is None and len(named) > 1:
        raise ReplayError(
            f"The runs have several values of replay_reward: {', '.join(named)}. Name the function to compare them "
            f"by: --reward {named[0]}."
        )
    found = [Outcome.of(run, reward or (named[0] if named and len(runs) > 1 else None)) for run in runs]
    empty = [outcome.run.label for outcome in found if len(runs) > 1 and not outcome.values]
    if empty:
        raise ReplayError(f"The log of {empty[0]} holds no reward: there is nothing to compare.")
    return found


def compare(outcomes: Sequence[Outcome]) -> list[str]:
    """Return in sentences how the settings of runs differ from those of the first; runs of one label differ by
    seed."""
    runs = [outcome.run for outcome in outcomes]
    first, *others = by_label(runs).values()
    name, key = outcomes[0].name, outcomes[0].key
    said = []
    for each, words in ((f"eval_{key}", f"{name} on evaluation prompts"), (key, name)):
        if all(run.numbers(each) for run in runs):
            said += [line for other in others for line in _compared(first, other, each, words)]
            said += [
                _ends(_paired(control, other), each, f"{words}, with as many updates a batch")
                for control, other in itertools.permutations(others, 2)
                if _is_control(control[0], other[0])
            ]
    if name == SUM and len(runs[0].functions) > 1:
        functions = " or ".join(runs[0].functions)
        said.append(f"The reward is the sum of several functions. Name the one that counts: --reward {functions}.")
    if any(run.per_batch and run.updates_per_batch is None for run in runs):
        said.append("Not every update was logged: one update a batch is assumed (logging_steps=1 tells).")
    return said if min(map(len, [first, *others])) >= ENOUGH else [*said, UNPROVEN]


def _is_control(run: Run, replaying: Run) -> bool:
    """Whether a run shows what the further updates of another do without its replay."""
    return replaying.attached and not run.attached and run.updates_per_batch == replaying.updates_per_batch


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each label, in the order in which labels first stand."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.label, []).append(run)
    return arms


def axis_of(runs: Sequence[Run]) -> str:
    """Return what runs are compared along: tokens where not all tell their completions, updates where not all tell
    those."""
    return next((axis for axis in AXES if all(np.isfinite(run.spent(axis)).all() for run in runs)), "updates")


Pairs: TypeAlias = Sequence[tuple[Run, Run]]
"""Of two settings, the runs of one seed."""


def _paired(first: Sequence[Run], second: Sequence[Run]) -> Pairs:
    """One setting against another, seed by seed where seeds are the same."""
    of_seed = {run.seed: run for run in first}
    return [(of_seed.get(run.seed, first[at % len(first)]), run) for at, run in enumerate(second)]


def _ends(pairs: Pairs, key: str, words: str) -> str:
    """Where both settings end."""
    goals, ends = zip(*((run.curve(key).end, other.curve(key).end) for run, other in pairs), strict=True)
    name, other = (run.label for run in pairs[0])
    higher = sum(end > goal for end, goal in zip(ends, goals, strict=True))
    seeds = f", higher on {higher} of {len(pairs)} seeds" if len(pairs) > 1 else ""
    return f"By {words}, {other} ends at {_middle(ends)}, and {name} at {_middle(goals)}{seeds}."


def _compared(first: Sequence[Run], second: Sequence[Run], key: str, words: str) -> list[str]:
    """One setting against the first."""
    pairs = _paired(first, second)
    goals = [run.curve(key).end for run, _ in pairs]
    ends = [run.curve(key).end for _, run in pairs]
    name, other = first[0].label, second[0].label
    lines = [_ends(pairs, key, words)]
    outcomes = {arm[0].label: [Outcome(run, words, key) for run in arm] for arm in (first, second)}
    axis = axis_of([*first, *second])
    if not any(outcome.rose for outcome in outcomes[name]):
        return [*lines, f"{name} did not rise, so there is no value to which {axis} could be counted."]
    stayed = 2 * sum(end >= goal for end, goal in zip(ends, goals, strict=True)) >= len(pairs)
    told = [
        _took(pairs, goals, key, each, stayed)
        for each in dict.fromkeys((axis, "seconds"))
        if all(np.isfinite(run.spent(each)).all() for pair in pairs for run in pair)
    ]
    lines.append(f"To the {words} at which {name} ends, {_middle(goals)}, {'; '.join(told)}.")
    crossed = [run.curve(key).first(goal) < np.inf for (_, run), goal in zip(pairs, goals, strict=True)]
    if not stayed and any(crossed):
        lines.append(f"{other} did not stay there: it crossed that value, and ends below it.")
    for label, arm in outcomes.items():
        best = [outcome.best for outcome in arm if outcome.fell]
        if best:
            lines.append(f"{label} fell after its best of {_middle(best)}, in {len(best)} of {len(arm)} runs.")
    return lines


def _took(pairs: Pairs, goals: Sequence[float], key: str, axis: str, stayed: bool) -> str:
    """What both took to the goals; with how much less that is, if the second one `stayed` there and all got there."""
    before = [run.curve(key, axis).first(goal) for (run, _), goal in zip(pairs, goals, strict=True)]
    after = [run.curve(key, axis).first(goal) for (_, run), goal in zip(pairs, goals, strict=True)]
    less = ""
    if stayed and all(before) and np.isfinite(after).all():
        less = f" ({_middle([1 - late / early for early, late in zip(before, after, strict=True)], _less)})"
    name, other = (run.label for run in pairs[0])
    return f"{name} took {_middle(before, _count)} {axis}, and {other} {_middle(after, _count)}{less}"


def _middle(values: Sequence[float], words: Callable[[float], str] = "{:.3g}".format) -> str:
    """The median in words, with the range of several values; of two in the middle the higher one."""
    ordered = sorted(values)
    low, median, high = (words(ordered[at]) for at in (0, len(ordered) // 2, -1))
    return median if low == high else f"{median} ({low} to {high})"


def _count(value: float) -> str:
    return "never" if np.isinf(value) else f"{value:,.0f}"


def _less(share: float) -> str:
    return f"{abs(share):.0%} {'less' if share > 0 else 'more'}" if round(share, 2) else "as many"
