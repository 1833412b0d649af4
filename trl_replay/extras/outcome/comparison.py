"""Runs side by side: what each took to the end of the first, and what became of it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...data.types import Floats
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
    counts = sorted({run.counts for run in runs if run.counts})
    if reward is None and len(counts) > 1:
        raise ReplayError(
            f"The runs have several values of replay_reward: {', '.join(counts)}. Name the function to compare them "
            f"by: --reward {counts[0]}."
        )
    found = [Outcome.of(run, reward or next(iter(counts), None)) for run in runs]
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
            said += [line for other in others for line in _compared(_paired(first, other), each, words)]
    if name == SUM and len(runs[0].functions) > 1:
        functions = " or ".join(runs[0].functions)
        said.append(f"The reward is the sum of several functions. Name the one that counts: --reward {functions}.")
    if any(run.per_batch and run.updates_per_batch is None for run in runs):
        said.append("Not every update was logged: one update a batch is assumed (logging_steps=1 tells).")
    return said if min(map(len, [first, *others])) >= ENOUGH else [*said, UNPROVEN]


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


def _paired(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """One setting against another, seed by seed where seeds are the same."""
    of_seed = {run.seed: run for run in first}
    return [(of_seed.get(run.seed, first[at % len(first)]), run) for at, run in enumerate(second)]


def _compared(pairs: list[tuple[Run, Run]], key: str, words: str) -> list[str]:
    """One setting against the first: of seeds whose first run rose, what both took to where that one ends."""
    arms = [[Outcome(run, words, key) for run in arm] for arm in zip(*pairs, strict=True)]
    goals, ends = (np.array([each.means[-1] for each in arm]) for arm in arms)
    (name, other), higher, stayed = (run.label for run in pairs[0]), (ends > goals).sum(), ends >= goals
    seeds = f", higher on {higher} of {len(pairs)} seeds" if len(pairs) > 1 else ""
    lines = [f"By {words}, {other} ends at {_middle(ends)}, and {name} at {_middle(goals)}{seeds}."]
    rising = [at for at, base in enumerate(arms[0]) if base.rises]
    told = []
    for axis in dict.fromkeys((axis_of([run for pair in pairs for run in pair]), "seconds")):
        before, after = (np.array([arm[at].run.curve(key, axis).first(goals[at]) for at in rising]) for arm in arms)
        if rising and not np.isnan([before, after]).any():
            there = stayed[rising].mean() >= 0.5 and before.all() and np.isfinite(after).all()
            less = f" ({_middle(1 - after / before, _less)})" if there else ""
            told.append(f"{name} took {_middle(before, _count)} {axis}, and {other} {_middle(after, _count)}{less}")
    if not rising:
        lines.append(f"{name} did not rise by more than its error: its end is no goal.")
    else:
        on = f" on {len(rising)} of {len(pairs)} seeds" if len(rising) < len(pairs) else ""
        lines.append(f"To the {words} at which {name} ends{on}, {_middle(goals[rising])}, {'; '.join(told)}.")
        if stayed[rising].mean() < 0.5 and any(arms[1][at].best >= goals[at] for at in rising):
            lines.append(f"{other} did not stay there: it crossed that value, and ends below it.")
    for arm in arms:
        best = [each.best for each in arm if each.falls]
        if best:
            label = arm[0].run.label
            lines.append(f"{label} fell after its best of {_middle(best)}, in {len(best)} of {len(arm)} runs.")
    return lines


def _middle(values: Sequence[float] | Floats, words: Callable[[float], str] = "{:.3g}".format) -> str:
    """The median in words, with the range of several values."""
    low, median, high = (words(float(middle(values))) for middle in (np.min, np.median, np.max))
    return median if low == high else f"{median} ({low} to {high})"


def _count(value: float) -> str:
    return "never" if np.isinf(value) else f"{value:,.0f}"


def _less(share: float) -> str:
    return f"{abs(share):.0%} {'less' if share > 0 else 'more'}" if round(share, 2) else "as many"
