"""Line charts and histograms as inline SVG, without scripts, fonts or anything else from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
BROADEST = 64


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


def line_chart(lines: Sequence[Line], x_label: str, percent: bool = False, low: float | None = None) -> str:
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
    parts += [
        _x_tick(place(value, bottom)[0], _shown(value)) for value in ticks(x_low, x_high) if x_low <= value <= x_high
    ]
    for line in lines:
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"/>')
        if len(line.points) == 1:
            x, y = place(*line.points[0])
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{line.color}"/>')
    legend = "".join(f'<span><i style="background:{line.color}"></i>{escape(line.label)}</span>' for line in lines)
    return f'<p class="legend">{legend}</p>{_svg(parts, x_label)}'


def histogram(values: Sequence[float], x_label: str, color: str, whole: bool = False, bins: int = 16) -> str:
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
    low, high = min(values), max(values)
    if whole:
        step = float(max(math.ceil((high - low + 1) / bins), 1))
        count = math.ceil((high - low + 1) / step)
    else:
        count = 1 if high == low else bins
        step = (high - low) / count if high > low else 1.0
    heights = [0] * count
    for value in values:
        heights[min(int((value - low) / step), count - 1)] += 1
    y_ticks = [value for value in ticks(0, max(heights)) if value == int(value)]
    top = max(max(heights), y_ticks[-1])
    unit = (WIDTH - LEFT - RIGHT) / count
    span = HEIGHT - TOP - BOTTOM
    parts = [_grid([(round(HEIGHT - BOTTOM - value / top * span, 1), _shown(value)) for value in y_ticks])]
    for number, height in enumerate(heights):
        x, tall = LEFT + number * unit, height / top * span
        start = low + number * step
        label = _shown(start) if not whole or step == 1 else f"{start:.0f}–{start + step - 1:.0f}"
        broad = min(max(unit - 2, 1), BROADEST)
        parts.append(
            f'<rect x="{x + (unit - broad) / 2:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{broad:.1f}" '
            f'height="{tall:.1f}" fill="{color}"><title>{label}: {height}</title></rect>'
        )
        if number % max(count // 5, 1) == 0:
            parts.append(_x_tick(x + unit / 2, label))
    return _svg(parts, x_label)


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


def _shown(value: float, percent: bool = False) -> str:
    return f"{value:.0%}" if percent else f"{value:.4g}"


def _grid(rows: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
        for y, text in rows
    )


def _x_tick(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>'


def _svg(parts: Sequence[str], x_label: str) -> str:
    label = (
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle" class="axis">{escape(x_label)}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}{label}</svg>'
