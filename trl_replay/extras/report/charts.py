"""Line charts as SVG, drawn by matplotlib, for page.html: no scripts, fonts or other files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ...errors import ReplayError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 120
"""Points from which on a line is drawn faint, with means of neighbors over it."""
MEANS = 30
"""Means of neighbors that are drawn."""
ROOM = 64
"""Characters of a legend that fit side by side; a label's sign takes four."""
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
"""Metadata that matplotlib leaves out."""

Point: TypeAlias = tuple[float, float]


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[Point]


def line_chart(lines: Sequence[Line], y_label: str, percent: bool = False, x_label: str = "step") -> str:
    """Lines over the steps, or what else `x_label` names, each named in a legend; lines without points are left out.

    Args:
        lines (`Sequence[Line]`): At least one.
        y_label (`str`): Names the values.
        percent (`bool`, *optional*, defaults to `False`): Values are shares; the axis goes from 0 to 100 %.

    Returns:
        `str`: The chart; empty without any point.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    figure, axes = _axes(x_label, y_label)
    for line in lines:
        _draw(axes, line)
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # runs of one label share a line
    axes.legend(
        handles.values(),
        handles,
        frameon=False,
        ncols=max(min(len(handles), ROOM // (4 + max(map(len, handles)))), 1),
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    return _svg(figure)


def _draw(axes: Axes, line: Line) -> None:
    points = np.array(line.points)
    if len(points) >= MANY:
        axes.plot(*points.T, color=line.color, alpha=0.3)
        points = np.array([part.mean(axis=0) for part in np.array_split(points, MEANS)])
    axes.plot(*points.T, color=line.color, label=line.label, marker=".")


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return a figure with empty axes.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReplayError("The report's charts need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(5.4, 2.7), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an SVG element, whose texts stay texts and whose background is the page's."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg", transparent=True, metadata=METADATA)
    text = written.getvalue()
    return text[text.index("<svg") :]
