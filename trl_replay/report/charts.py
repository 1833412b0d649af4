"""Line charts and histograms as inline SVG, without scripts, fonts or anything else from outside.

Colours are CSS values, so that the page that holds the charts may have another look in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 520, 264
LEFT, RIGHT, TOP, BOTTOM = 56, 26, 30, 42
BROADEST = 64
MANY = 120
"""Points from which on a line is drawn faint, with its running mean over it."""
MOST = 600
"""Points of a line that are drawn; of more, the means of neighbours."""


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    percent: bool = False,
    low: float | None = None,
) -> str:
    """Lines over a common axis, each named in the legend above.

    Args:
        lines (`Sequence[Line]`): Those without points are left out.
        x_label (`str`): Below the axis.
        percent (`bool`, *optional*, defaults to `False`): Values are shares; the axis goes from 0 to 100 %.
        low (`float`, *optional*): Lower end of the axis, if values do not go below it.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return '<p class="none">nothing was logged</p>'
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    bottom, top = (0.0, 1.0) if percent else (min(ys) if low is None else min(low, *ys), max(ys))
    y_ticks = ticks(bottom, top)
    bottom, top = min(bottom, y_ticks[0]), max(top, y_ticks[-1])
    x_low, x_high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(up, 1)

    parts = [_grid([(place(x_low, value)[1], _shown(value, percent)) for value in y_ticks])]
    x_ticks = [value for value in ticks(x_low, x_high) if x_low <= value <= x_high]
    if x_ticks[0] - x_low > 0.15 * (x_high - x_low):
        x_ticks.insert(0, x_low)
    parts += [_x_tick(place(value, bottom)[0], _shown(value)) for value in x_ticks]
    span = 0
    for line in lines:
        drawn = [place(*point) for point in thinned(line.points, MOST)]
        if len(line.points) >= MANY:
            span = len(line.points) // 30
            parts.append(_polyline(drawn, line.color, "raw"))
            drawn = [place(*point) for point in thinned(smoothed(line.points, span), MOST)]
        parts.append(_polyline(drawn, line.color, "mean"))
        if len(drawn) == 1:
            parts.append(f'<circle cx="{drawn[0][0]}" cy="{drawn[0][1]}" r="3" style="fill:{line.color}"/>')
    keys = [f'<span><i style="background:{line.color}"></i>{escape(line.label)}</span>' for line in lines]
    note = f"<span>thick: means of {span} steps</span>" if span else ""
    title = ", ".join(line.label for line in lines)
    return f'<p class="legend">{"".join(keys)}{note}</p>{_svg(parts, x_label, title)}'


def histogram(
    values: Sequence[float],
    x_label: str,
    color: str,
    whole: bool = False,
    bins: int = 16,
) -> str:
    """How often which values occur.

    Args:
        values (`Sequence[float]`): Finite numbers.
        x_label (`str`): Below the axis.
        color (`str`): Of the bars.
        whole (`bool`, *optional*, defaults to `False`): Values are whole numbers: bars stand for whole ranges of them.
        bins (`int`, *optional*, defaults to `16`): Most bars.
    """
    if not values:
        return '<p class="none">the buffer is empty</p>'
    labels, heights = _bars(values, whole, bins)
    y_ticks = [value for value in ticks(0, max(heights)) if value == int(value)]
    top = max(max(heights), y_ticks[-1])
    unit = (WIDTH - LEFT - RIGHT) / len(heights)
    span = HEIGHT - TOP - BOTTOM
    parts = [_grid([(round(HEIGHT - BOTTOM - value / top * span, 1), _shown(value)) for value in y_ticks])]
    parts.append('<text x="4" y="12" class="axis">groups</text>')
    shown = max(
        math.ceil(len(heights) / 5),
        math.ceil(len(heights) * max(map(len, labels)) / 45),
    )
    for number, (label, height) in enumerate(zip(labels, heights, strict=True)):
        x, tall = LEFT + number * unit, height / top * span
        broad = min(max(unit - 2, 1), BROADEST)
        parts.append(
            f'<rect x="{x + (unit - broad) / 2:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{broad:.1f}" '
            f'height="{tall:.1f}" style="fill:{color}"><title>{label}: {height}</title></rect>'
        )
        if len(heights) <= 6 or number % shown == 0:
            parts.append(_x_tick(x + unit / 2, label))
    return _svg(parts, x_label, f"how many groups have which {x_label}")


def _bars(values: Sequence[float], whole: bool, bins: int) -> tuple[list[str], list[int]]:
    """`(labels, heights)`: a bar for each value if they are few, and else for ranges of one breadth."""
    low, high = min(values), max(values)
    few = sorted({_shown(value) for value in values}, key=float)
    if not whole and len(few) <= 6:
        shown = [_shown(value) for value in values]
        return few, [shown.count(label) for label in few]
    if whole:
        step = float(max(math.ceil((high - low + 1) / bins), 1))
        count = math.ceil((high - low + 1) / step)
    else:
        count = 1 if high == low else bins
        step = (high - low) / count if high > low else 1.0
    heights = [0] * count
    for value in values:
        heights[min(int((value - low) / step), count - 1)] += 1
    starts = [low + number * step for number in range(count)]
    labels = [_shown(at) if not whole or step == 1 else f"{at:.0f}–{at + step - 1:.0f}" for at in starts]
    return labels, heights


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `low` to `high`, about `count` steps of them."""
    if not high > low:
        high = low + 1
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def smoothed(points: Sequence[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """Each value's mean with its neighbours, `span` values in all and fewer at both ends."""
    values = np.array([y for _, y in points], dtype=np.float64)
    window = np.ones(max(span, 1))
    sums, counts = (
        np.convolve(values, window, "same"),
        np.convolve(np.ones_like(values), window, "same"),
    )
    return [(x, float(mean)) for (x, _), mean in zip(points, sums / counts, strict=True)]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the means of neighbours where there are more."""
    size = math.ceil(len(points) / most)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        (
            sum(x for x, _ in part) / len(part),
            sum(y for _, y in part) / len(part),
        )
        for part in parts
    ]


def _shown(value: float, percent: bool = False) -> str:
    return f"{value:.0%}" if percent else f"{value:.4g}"


def _polyline(points: Sequence[tuple[float, float]], color: str, kind: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}" style="stroke:{color}"/>'


def _grid(rows: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
        for y, text in rows
    )


def _x_tick(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'


def _svg(parts: Sequence[str], x_label: str, title: str) -> str:
    label = (
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle" class="axis">{escape(x_label)}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}{label}</svg>'
