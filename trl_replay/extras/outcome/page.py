"""The page of `trl-replay report --html`: what was printed, with charts. It needs nothing else."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from ...base.files import replacing
from .comparison import axis_of, by_label
from .outcome import ESS, REPLACED, Outcome
from .run import DEAD, DEAD_AFTER, REDRAWN, Run

NO_CHARTS = "For charts: pip install matplotlib, and run this again."


def write_page(path: Path, lines: Sequence[str], rows: Sequence[Sequence[str]], outcomes: Sequence[Outcome]) -> Path:
    """Write the page, and return its path. What comes from a file is a number, or is escaped.

    Args:
        path (`Path`): Where to.
        lines (`Sequence[str]`): What was printed.
        rows (`Sequence[Sequence[str]]`): Of the table: its heads, then a name and a value of each run.
        outcomes (`Sequence[Outcome]`): At least one.
    """
    runs = [outcome.run for outcome in outcomes]
    charts = charts_of(runs, outcomes[0].key)
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    text = environment.get_template("page.html").render(
        name=", ".join(by_label(runs)),
        lines=[*lines, NO_CHARTS if charts is None else ""],
        rows=rows,
        charts=charts or {},
    )
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def charts_of(runs: Sequence[Run], key: str) -> dict[str, str] | None:
    """Return charts as SVG by their titles, each series in a color of its own: the mean over seeds, and their range;
    None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    axis, arms = axis_of(runs), by_label(runs)
    reward = {"": key, "on evaluation prompts": f"eval_{key}"}
    lines = {
        f"Reward over {axis}": (axis, reward),
        "Reward over seconds": ("seconds", reward),
        "Dead groups": (axis, {"generated": DEAD, "trained on": DEAD_AFTER}),
        "Replayed groups": (axis, {"replaced": REPLACED, "drawn anew in further updates": REDRAWN}),
        "How far the policy has moved": (axis, {"importance ratio": "replay/ratio_mean", "effective sample": ESS}),
    }
    charts = {}
    for title, (along, metrics) in lines.items():
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for label, words in itertools.product(arms, metrics):
            curves = [np.array(run.points(metrics[words], along)) for run in arms[label]]
            curves = [curve for curve in curves if curve.size and np.isfinite(curve).all()]
            if curves:
                spent = np.unique(np.concatenate([curve[0] for curve in curves]))
                values = np.array([np.interp(spent, at, of, np.nan, np.nan) for at, of in curves])
                name = " " + f"{label} {words}".strip().replace("$", r"\$")  # else a formula, or hidden
                (line,) = axes.plot(spent, values.mean(axis=0), label=name, marker=".")
                low, high = values.min(axis=0), values.max(axis=0)
                axes.fill_between(spent, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if axes.lines:
            axes.set(xlabel=along)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
            charts[title] = _svg(figure)
    return charts


def _svg(figure: Any) -> str:
    """The figure as an SVG element, whose texts stay texts and whose background is the page's."""
    from matplotlib import rc_context

    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue()
    return text[text.index("<svg") :]
