"""Runs that are compared, and what they are judged by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...data.counters import DRY_RUN
from ...data.types import Floats
from ...errors import ReplayError
from ..advice.logged import (
    COUNTED_STEP,
    DEAD,
    DEAD_EXACT,
    ROLLOUTS,
    SUM,
    Log,
    at_ends,
    functions,
    is_number,
    judged_by,
    steps,
)
from ..advice.rules import DEAD_AFTER
from .charts import Line
from .crossing import Curve
from .inspection import settings_of
from .log import read_log

AXES = ("completions generated", "tokens of prompts and completions", "updates", "seconds in training steps")
TOKENS, UPDATES = 1, 2
"""The places of two of them."""
TOKENS_SEEN = "num_tokens"
"""TRL's running count of the tokens that it generated, and of their prompts: replayed ones are not counted again."""
CHECKPOINT = re.compile(r"checkpoint-\d+")
LAST_NUMBER = re.compile(r"(\d+)\D*$")
SEED = re.compile(r"[-_.]?(?:seed|(?<=[-_.])s)[-_.]?\d+$")
"""The end of a folder's name that tells the seed: `-seed3`, `_s3`."""


class Measure(NamedTuple):
    """What runs are judged by.

    Attributes:
        name (`str`): A reward function, [`SUM`], or another logged metric.
        key (`str`): It in the log.
        given (`bool`): Somebody named it: the user, or `replay_reward`.
    """

    name: str
    key: str
    given: bool = True

    @property
    def words(self) -> str:
        """It on a page."""
        return "reward" if self.name == SUM else self.name

    @property
    def evaluated(self) -> str:
        """The same of evaluation prompts."""
        return f"eval_{self.key}"


class Run(NamedTuple):
    """A run that is compared.

    Attributes:
        label (`str`): Names its settings: runs with one label differ by seed.
        log (`Log`): Its logged steps.
        completions (`int`, *optional*): Those of an update, for a log that does not count them.
        evaluations (`Log`): Its logged evaluations.
        counts (`str`, *optional*): Its `replay_reward`; None where its settings name none, or are not known.
        seed (`int`, *optional*): The last number in its folder's name.
    """

    label: str
    log: Log
    completions: int | None = None
    evaluations: Log = ()
    counts: str | None = None
    seed: int | None = None

    def column(self, name: str) -> Floats:
        """A metric of each logged step; NaN where it has none."""
        values = [entry.get(name) for entry in self.log]
        return np.array([value if is_number(value) else np.nan for value in values], np.float64)

    @property
    def axes(self) -> list[Floats]:
        """Its progress at each logged step, by each of `AXES`; NaN where the log does not tell."""
        updates, rollouts = self.column("step"), self.column(ROLLOUTS)
        if self.completions and np.isnan(rollouts).all():
            rollouts = self.completions * updates
        seconds = np.diff(updates, prepend=0) * self.column("step_time")
        return [rollouts, self.column(TOKENS_SEEN), updates, seconds.cumsum()]

    def logs(self, key: str) -> bool:
        """Tell whether any step or evaluation has this metric."""
        return any(is_number(entry.get(key)) for entry in (*self.log, *self.evaluations))

    def series(self, key: str) -> tuple[list[Floats], Floats]:
        """Return a metric's values, and the progress at each of them by `AXES`."""
        updates = self.column("step")
        entries = self.log if any(is_number(entry.get(key)) for entry in self.log) else self.evaluations
        found = [(entry["step"], entry[key]) for entry in entries if is_number(entry.get(key))]
        at, values = np.array(found, np.float64).reshape(-1, 2).T
        return [_between(updates, axis, at) for axis in self.axes], values

    def curve(self, key: str, axis: int) -> Curve:
        """A metric's means over a tenth of its values, along one of `AXES`, without places that the log does not
        tell."""
        axes, values = self.series(key)
        known = np.isfinite(axes[axis])
        return smoothed(axes[axis][known], values[known])

    def final(self, key: str) -> float:
        """A metric's mean over the last tenth of its values."""
        _, values = self.series(key)
        return smoothed(values, values).end

    def reached(self, key: str, level: float) -> list[float]:
        """By axis, where a metric's mean over a tenth of its values first crossed a level; infinity if it never did,
        NaN where the log does not tell."""
        curves = [self.curve(key, axis) for axis in range(len(AXES))]
        return [curve.first(level) if len(curve.values) else np.nan for curve in curves]

    def dead_by(self, measure: Measure) -> tuple[Floats, Floats]:
        """Shares of dead groups of each step, generated and trained on, by the function that counts; NaN where they
        were not counted by it."""
        unknown = np.full(len(self.log), np.nan)
        of_function = self.column(f"{DEAD_EXACT}/{measure.name}")
        is_sum = measure.name == SUM or functions(self.log) in ([], [measure.name])
        own = self.counts == measure.name or (self.counts is None and (is_sum or np.isnan(of_function).all()))
        exact = self.column(DEAD_EXACT) if own else unknown if is_sum else of_function
        generated = np.where(np.isnan(exact), self.column(DEAD) if is_sum else unknown, exact)
        after = self.column(DEAD_AFTER)
        acted = ~np.isnan(after) & (self.column(DRY_RUN) != 1)
        return generated, np.where(acted, after if own else unknown, generated)

    def line(self, x: Floats, y: Floats, color: str) -> Line:
        """A line of a chart, without what is NaN."""
        points = np.stack([x, y], axis=1)
        label = " " + self.label.replace("$", r"\$")  # else matplotlib would hide it, or take it for a formula
        return Line(label, color, points[np.isfinite(points).all(axis=1)].tolist())


def smoothed(at: Floats, values: Floats) -> Curve:
    """Return the means over a tenth of the values, each where its last value is."""
    width = at_ends(len(values))
    means = np.convolve(values, np.full(width, 1 / width), "valid") if len(values) else values
    return Curve(at[width - 1 :].tolist(), means.tolist())


def _between(updates: Floats, axis: Floats, at: Floats) -> Floats:
    """An axis that is known at `updates`, at others."""
    known = np.isfinite(axis)
    return np.interp(at, updates[known], axis[known]) if known.any() else np.full(len(at), np.nan)


def read_run(given: str, completions: int | None = None) -> Run:
    """Read a run, `folder` or `label=folder`. Without a label, the folder's name is it, but for a seed.

    Raises:
        ReplayError: There is no log of GRPO, or it can't be read.
    """
    label, path = _labeled(given)
    entries = read_log(path)
    log = [entry for entry in steps(entries) if is_number(entry.get(SUM)) and is_number(entry[DEAD])]
    if not log:
        raise ReplayError(f"The log of {path} holds no step of GRPO: there is nothing to compare.")
    if COUNTED_STEP in log[0]:
        raise ReplayError(f"{path} names no steps, by which runs are compared: give the run's output_dir, or a file.")
    counts = settings_of(path).get("replay_reward") or judged_by(log)
    name = path.resolve().name
    return Run(label or SEED.sub("", name) or name, log, completions, evaluations(entries), counts, seed_of(path))


def evaluations(entries: Log) -> Log:
    """Return the entries of a log that are of an evaluation."""
    return [entry for entry in entries if is_number(entry.get("step")) and f"eval_{SUM}" in entry]


def seed_of(path: Path) -> int | None:
    """Return the last number in the name of a run's folder, or of its file; None without one."""
    path = path.resolve()
    path = path.parent if CHECKPOINT.fullmatch(path.name) or path.name == "trainer_state.json" else path
    path = path.parent if CHECKPOINT.fullmatch(path.name) else path
    found = LAST_NUMBER.search(path.stem if path.suffix else path.name)
    return int(found[1]) if found else None


def _labeled(given: str) -> tuple[str, Path]:
    """The label, which may be empty, and the folder, whose name may have an equals sign."""
    if Path(given).exists():
        return "", Path(given)
    parts = given.split("=")
    cuts = [("=".join(parts[:count]), Path("=".join(parts[count:]))) for count in range(1, len(parts))]
    return next((cut for cut in cuts if cut[1].exists()), ("", Path(given)))


def measure_of(runs: Sequence[Run], given: str | None) -> Measure:
    """Return what to judge runs by: the given name, or else the runs' `replay_reward`, or else the sum.

    Raises:
        ReplayError: A run did not log it, or the runs name several.
    """
    counted = sorted({run.counts for run in runs if run.counts})
    if given is None and len(counted) > 1:
        raise ReplayError(
            f"The runs have several values of replay_reward: {', '.join(counted)}. Name the function to compare them "
            f"by: --reward {counted[0]}."
        )
    name = given or (counted[0] if counted else SUM)
    keys = (f"rewards/{name}/mean", name)
    for run in runs:
        if not any(run.logs(key) for key in keys):
            names = ", ".join([SUM, *functions(run.log)])
            raise ReplayError(
                f"The log of {run.label} has no reward {name!r}. It has: {names}. Name one of them: --reward NAME."
            )
    return Measure(name, next(key for key in keys if runs[0].logs(key)), bool(given or counted))
