"""`trl-replay report A B …`: runs side by side as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..advice.logged import DEAD, DEAD_EXACT, DRY_RUN, Log, is_number, steps
from ..base.sizes import counted
from ..data.types import Floats
from ..errors import ReplayError
from .charts import Line, line_chart
from .log import read_log
from .page import DEAD_AFTER, render

AXES = ("completions generated", "updates", "seconds in training steps")
COLORS = ("#2f86d8", "#dd6249", "#3b9d5d", "#a066c9", "#b8860b", "#868d97")
"""One a label, seen on a light and on a dark page."""
ENOUGH = 3
"""Runs of each label without which the page says that nothing is proven."""


class Run(NamedTuple):
    """A run that is compared.

    Attributes:
        label (`str`): Names its settings: runs with one label differ by seed.
        log (`Log`): Its logged steps.
        completions (`int`, *optional*): Those of an update, for a log that does not count them.
    """

    label: str
    log: Log
    completions: int | None = None

    def column(self, name: str) -> Floats:
        """A metric of each logged step; NaN where it has none."""
        values = [entry.get(name) for entry in self.log]
        return np.array([value if is_number(value) else np.nan for value in values], np.float64)

    @property
    def axes(self) -> list[Floats]:
        """Its progress at each logged step, by each of `AXES`; NaN where the log does not tell."""
        updates, rollouts = self.column("step"), self.column("replay/rollouts")
        if self.completions and np.isnan(rollouts).all():
            rollouts = self.completions * updates
        seconds = np.diff(updates, prepend=0) * self.column("step_time")
        return [rollouts, updates, seconds.cumsum()]

    @property
    def final(self) -> float:
        """The mean reward over the last tenth of the log."""
        return float(self.column("reward")[-max(len(self.log) // 10, 1) :].mean())

    def reached(self, level: float) -> list[float]:
        """By axis, where the mean reward over a twentieth of the log first reached a level; NaN if never."""
        width = max(len(self.log) // 20, 1)
        means = np.convolve(self.column("reward"), np.full(width, 1 / width), "valid")
        there = np.flatnonzero(means >= level)[:1] + width - 1
        return [float(axis[there].sum()) if len(there) else np.nan for axis in self.axes]

    def line(self, x: Floats, y: Floats, color: str) -> Line:
        """A line of a chart, without what is NaN."""
        points = np.stack([x, y], axis=1)
        label = " " + self.label.replace("$", r"\$")  # else matplotlib would hide it, or take it for a formula
        return Line(label, color, points[np.isfinite(points).all(axis=1)].tolist())


def read_run(given: str, completions: int | None = None) -> Run:
    """Read a run, `folder` or `label=folder`.

    Raises:
        ReplayError: There is no log of GRPO, or it can't be read.
    """
    label, path = _labeled(given)
    log = [entry for entry in steps(read_log(path)) if is_number(entry.get("reward")) and is_number(entry[DEAD])]
    if not log:
        raise ReplayError(f"The log of {path} holds no step of GRPO: there is nothing to compare.")
    return Run(label or path.resolve().name, log, completions)


def _labeled(given: str) -> tuple[str, Path]:
    """The label, which may be empty, and the folder, whose name may have an equals sign."""
    if Path(given).exists():
        return "", Path(given)
    parts = given.split("=")
    cuts = [("=".join(parts[:count]), Path("=".join(parts[count:]))) for count in range(1, len(parts))]
    return next((cut for cut in cuts if cut[1].exists()), ("", Path(given)))


def comparison(runs: Sequence[Run], level: float | None = None) -> str:
    """The page. What comes from a file is a number, or is escaped.

    Args:
        runs (`Sequence[Run]`): At least one.
        level (`float`, *optional*): The reward whose way is told; if not given, halfway to the best final one, from 0
            or from a lower first one.
    """
    finals: dict[str, list[float]] = {}
    for run in runs:
        finals.setdefault(run.label, []).append(run.final)
    colors = dict(zip(finals, COLORS * len(finals), strict=False))
    if level is None:
        first = min(float(run.column("reward")[0]) for run in runs)
        level = (min(first, 0.0) + max(run.final for run in runs)) / 2
    charts = {
        f"Reward over {axis}": line_chart(
            [run.line(run.axes[number], run.column("reward"), colors[run.label]) for run in runs],
            "mean reward",
            x_label=axis,
        )
        for number, axis in enumerate(AXES)
    }
    dead = [run.line(run.column("step"), _trained_on(run), colors[run.label]) for run in runs]
    charts["Dead groups that were trained on"] = line_chart(dead, "share of groups", percent=True, x_label="updates")
    rows = [(run, run.reached(level), _generated(run).mean(), _trained_on(run).mean()) for run in runs]
    verdict = _verdict(finals)
    return render("comparison.html", name=", ".join(finals), verdict=verdict, level=level, rows=rows, charts=charts)


def _generated(run: Run) -> Floats:
    """Share of dead groups that were generated: replay's own where it is logged."""
    exact = run.column(DEAD_EXACT)
    return np.where(np.isnan(exact), run.column(DEAD), exact)


def _trained_on(run: Run) -> Floats:
    """Share of dead groups that were trained on."""
    after = run.column(DEAD_AFTER)
    replaced = ~np.isnan(after) & (run.column(DRY_RUN) != 1)
    return np.where(replaced, after, _generated(run))


def _verdict(finals: dict[str, list[float]]) -> str:
    """Tell what final rewards by label show, and where they show nothing, what would."""
    ranges = [
        f"{label} {min(ends):.3g} to {max(ends):.3g} ({counted(len(ends), 'run')})" for label, ends in finals.items()
    ]
    told = f"Final rewards: {', '.join(ranges)}."
    if min(map(len, finals.values())) >= ENOUGH:
        return f"{told} Ranges that overlap show no difference."
    return (
        f"{told} This proves nothing yet: seeds of the same settings differ as much as settings do (five seeds of the "
        f"defaults ended between 0.37 and 1.00 on our lock). Train each setting with at least {ENOUGH} seeds, better "
        "5, on as many completions, at a learning rate chosen for it on other seeds, and give runs of one setting one "
        "label: label=folder."
    )
