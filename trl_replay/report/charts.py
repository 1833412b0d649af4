"""Line charts and histograms in the units of an SVG; page.html draws them, without scripts or fonts.

Colors are CSS values, so that the page that holds the charts may have another look in the dark.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

FRAME = {"width": 520, "height": 264, "left": 56, "right": 494, "top": 30, "base": 222}
"""The picture, and the edges of its drawing area."""
BROADEST = 64
"""Greatest width of a bar."""
MANY = 120
"""Points from which on a line is drawn faint, with means of neighbors over it."""
MOST = 600
"""Points of a line that are drawn; of more, the means of neighbors."""
BINS = 16
"""Most bars of a histogram."""

Point: TypeAlias = tuple[float, float]


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[Point]


class _Axis(NamedTuple):
    """Where values are drawn: `low` at the beginning of an axis, `high` at its end."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, percent: bool = False, low: float | None = None
) -> dict[str, Any]:
    """Lines over a common axis, each named in the legend above.

    Args:
        lines (`Sequence[Line]`): Those without points are left out.
        x_label (`str`): Below the axis.
        y_label (`str`): Over the other one.
        percent (`bool`, *optional*, defaults to `False`): Values are shares; the axis goes from 0 to 100 %.
        low (`float`, *optional*): Lower end of the axis, if values do not go below it.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return {"lines": []}
    points = np.array([point for line in lines for point in line.points])
    (left, lowest), (right, highest) = points.min(axis=0), points.max(axis=0)
    y_ticks = ticks(0, 1) if percent else ticks(lowest if low is None else min(low, lowest), highest)
    x = _Axis(left, max(right, left + 1), FRAME["left"], FRAME["right"])
    y = _Axis(y_ticks[0], y_ticks[-1], FRAME["base"], FRAME["top"])
    x_ticks = [value for value in ticks(left, right) if left <= value <= right] or [left]
    drawn = []
    for line in lines:
        if len(line.points) >= MANY:
            drawn.append(("raw", line.color, _places(line.points, MOST, x, y)))
        drawn.append(("mean", line.color, _places(line.points, MANY // 4 if len(line.points) >= MANY else MANY, x, y)))
    many = max(len(line.points) for line in lines)
    return {
        "title": ", ".join(line.label for line in lines),
        "legend": [(line.color, line.label) for line in lines],
        "note": f"thin: each logged step; thick: means of {4 * many // MANY} of them" if many >= MANY else "",
        "x_label": x_label,
        "y_label": y_label,
        "x_ticks": [(x(value), f"{value:.4g}") for value in x_ticks],
        "y_ticks": [(y(value), f"{value:.0%}" if percent else f"{value:.4g}") for value in y_ticks],
        "lines": drawn,
        "bars": [],
    }


def _places(points: Sequence[Point], most: int, x: _Axis, y: _Axis) -> str:
    """The points of a polyline: the means of neighbors where there are more than `most`; of one point a dot."""
    parts = np.array_split(np.array(points), most) if len(points) > most else np.array(points)[:, None]
    means = [part.mean(axis=0) for part in parts]
    return " ".join(f"{x(at)},{y(value)}" for at, value in (means if len(means) > 1 else 2 * means))


def histogram(values: Sequence[float], x_label: str, color: str, whole: bool = False) -> dict[str, Any]:
    """How often which values occur: a bar for each value if they are few, and else for ranges of one breadth.

    Args:
        values (`Sequence[float]`): Finite numbers.
        x_label (`str`): Below the axis.
        color (`str`): Of the bars.
        whole (`bool`, *optional*, defaults to `False`): Values are whole numbers: bars stand for whole ranges of them.
    """
    if not values:
        return {"bars": []}
    heights = _few(values) or _ranges(np.array(values, np.float64), whole)
    y_ticks = [value for value in ticks(0, max(heights.values())) if value == int(value)]
    y = _Axis(0, y_ticks[-1], FRAME["base"], FRAME["top"])
    unit = (FRAME["right"] - FRAME["left"]) / len(heights)
    width = min(unit - 2, BROADEST)
    middles = [FRAME["left"] + unit * (number + 0.5) for number in range(len(heights))]
    every = math.ceil(len(heights) * max(map(len, heights)) / 45)  # so that labels don't overlap
    bars = []
    for middle, (label, height) in zip(middles, heights.items(), strict=True):
        top = y(height)
        bars.append((round(middle - width / 2, 1), top, round(width, 1), FRAME["base"] - top, f"{label}: {height}"))
    return {
        "title": f"how many groups have which {x_label}",
        "color": color,
        "x_label": x_label,
        "y_label": "groups",
        "x_ticks": [(round(middle, 1), label) for middle, label in zip(middles, heights, strict=True)][::every],
        "y_ticks": [(y(value), f"{value:.4g}") for value in y_ticks],
        "lines": [],
        "bars": bars,
    }


def _few(values: Sequence[float]) -> dict[str, int]:
    """How often each value occurs, if they are few."""
    counts = Counter(f"{value:.4g}" for value in values)
    return {label: counts[label] for label in sorted(counts, key=float)} if len(counts) <= 6 else {}


def _ranges(values: Any, whole: bool) -> dict[str, int]:
    """How many values lie in each range."""
    low, high = values.min(), values.max()
    step = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS
    starts = low + step * np.arange(math.ceil((high - low + 1) / step) if whole else BINS)
    bars = np.minimum((values - low) // step, len(starts) - 1).astype(int)
    labels = [f"{start:.0f}–{start + step - 1:.0f}" if whole and step > 1 else f"{start:.4g}" for start in starts]
    return dict(zip(labels, np.bincount(bars, minlength=len(starts)).tolist(), strict=True))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `low` to `high`, about `count` steps of them."""
    if high - low <= abs(low) * 1e-9:
        high = low + max(abs(low) * 1e-9, 1)
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
