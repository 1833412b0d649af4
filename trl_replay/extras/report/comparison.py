"""`trl-replay report A B …`: runs side by side as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..advice.logged import SUM
from .charts import line_chart
from .page import render
from .runs import AXES, UPDATES, Measure, Run, measure_of
from .verdict import common_axis, to_end, told

COLORS = ("#2f86d8", "#dd6249", "#3b9d5d", "#a066c9", "#b8860b", "#868d97")
"""One a label, seen on a light and on a dark page."""


def comparison(runs: Sequence[Run], given: str | None = None, level: float | None = None) -> str:
    """The page. What comes from a file is a number, or is escaped.

    Args:
        runs (`Sequence[Run]`): At least one.
        given (`str`, *optional*): The reward function that counts, or another logged metric; if not given, the runs'
            `replay_reward`, or else the sum.
        level (`float`, *optional*): The value whose way is told; if not given, the lower end value of the first two
            settings, or halfway to the best one where the lower one did not rise.

    Raises:
        ReplayError: A run did not log what is given, or the runs name several.
    """
    measure, arms = measure_of(runs, given), by_label(runs)
    level = _level(arms, measure) if level is None else level
    rows = []
    for run in runs:
        generated, trained_on = run.dead_by(measure)
        end = run.final(measure.evaluated) if run.logs(measure.evaluated) else np.nan
        rows.append(
            (run, run.reached(measure.key, level), run.final(measure.key), end, generated.mean(), trained_on.mean())
        )
    return render(
        "comparison.html",
        name=", ".join(arm[0].label for arm in arms),
        verdict=told(arms, measure),
        what=measure.words,
        level=level,
        infinity=np.inf,
        rows=rows,
        evaluated=any(run.logs(measure.evaluated) for run in runs),
        uncounted=any(np.isnan(generated) for *_, generated, _ in rows),
        charts=_charts(runs, [arm[0].label for arm in arms], measure),
    )


def by_label(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs of each label, in the order in which labels first stand."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.label, []).append(run)
    return list(arms.values())


def verdict(runs: Sequence[Run], given: str | None = None) -> list[str]:
    """Tell what the page says first, in sentences."""
    return told(by_label(runs), measure_of(runs, given))


def _charts(runs: Sequence[Run], labels: Sequence[str], measure: Measure) -> dict[str, str]:
    """Every chart by its title, empty where nothing was logged."""
    colors = dict(zip(labels, COLORS * len(labels), strict=False))
    what, progress = measure.words, min(common_axis(runs, measure.key), UPDATES - 1)
    charts = {
        f"{what.capitalize()} over {AXES[number]}": _chart(runs, colors, measure.key, number, f"mean {what}")
        for number in (progress, *range(UPDATES, len(AXES)))
    }
    evaluated = [run for run in runs if run.logs(measure.evaluated)]
    if evaluated:
        charts |= {
            f"{what.capitalize()} on evaluation prompts, over {AXES[number]}": chart
            for number in (progress, UPDATES)
            if (chart := _chart(evaluated, colors, measure.evaluated, number, f"mean {what}"))
        }
    dead = [run.line(run.column("step"), run.dead_by(measure)[1], colors[run.label]) for run in runs]
    title = "Dead groups that were trained on" + (f", by {what}" if measure.name != SUM else "")
    return {**charts, title: line_chart(dead, "share of groups", percent=True, x_label="updates")}


def _chart(runs: Sequence[Run], colors: dict[str, str], key: str, number: int, words: str) -> str:
    series = [(run, *run.series(key)) for run in runs]
    lines = [run.line(axes[number], values, colors[run.label]) for run, axes, values in series]
    return line_chart(lines, words, x_label=AXES[number])


def _level(arms: Sequence[Sequence[Run]], measure: Measure) -> float:
    """The value whose way is told, if none is given."""
    found = to_end(arms[0], arms[min(1, len(arms) - 1)], measure.key)
    if found is not None:
        return found.level
    runs = [run for arm in arms for run in arm]
    first = min(float(run.series(measure.key)[1][0]) for run in runs)
    return (min(first, 0.0) + max(run.final(measure.key) for run in runs)) / 2
