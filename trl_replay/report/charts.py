"""Line charts and histograms as inline SVG, without scripts, fonts or anything else from outside.

Colors are CSS values, so that the page that holds the charts may have another look in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple, TypeAlias

import numpy as np

WIDTH = 520
HEIGHT = 264
LEFT = 56
RIGHT = 26
TOP = 30
BOTTOM = 42
"""The picture and its margins, in the units of its `viewBox`."""
INNER_WIDTH = WIDTH - LEFT - RIGHT
INNER_HEIGHT = HEIGHT - TOP - BOTTOM
BASE = HEIGHT - BOTTOM
"""Where the x axis is."""
UNDER = 22
"""How far below the x axis its numbers stand: the number of the y axis at its foot stays apart from the first."""
BROADEST = 64
"""Greatest width of a bar."""
MANY = 120
"""Points from which on a line is drawn faint, with its running mean over it."""
MOST = 600
"""Points of a line that are drawn; of more, the means of neighbors."""

Point: TypeAlias = tuple[float, float]


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[Point]


class _Axes(NamedTuple):
    """The values at the edges of the drawing area."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        """How far from the left a value is drawn."""
        share = (value - self.left) / (self.right - self.left)
        return round(LEFT + share * INNER_WIDTH, 1)

    def y(self, value: float) -> float:
        """How far from above a value is drawn."""
        share = (value - self.bottom) / (self.top - self.bottom)
        return round(BASE - share * INNER_HEIGHT, 1)


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, percent: bool = False, low: float | None = None
) -> str:
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
        return '<p class="none">nothing was logged</p>'
    bottom, top = _y_range(lines, percent, low)
    y_ticks = ticks(bottom, top)
    axes = _axes(lines, min(bottom, y_ticks[0]), max(top, y_ticks[-1]))
    parts = [_grid(axes, y_ticks, percent), _y_name(y_label)]
    for value in _x_ticks(axes):
        parts.append(_x_tick(axes.x(value), _shown(value)))
    for line in lines:
        parts += _drawn(line, axes)
    title = ", ".join(line.label for line in lines)
    return _legend(lines) + _svg(parts, x_label, title)


def _y_range(lines: Sequence[Line], percent: bool, low: float | None) -> tuple[float, float]:
    """The least and the greatest value that the y axis must show."""
    if percent:
        return 0.0, 1.0
    values = [y for line in lines for _, y in line.points]
    bottom = min(values)
    if low is not None:
        bottom = min(low, bottom)
    return bottom, max(values)


def _axes(lines: Sequence[Line], bottom: float, top: float) -> _Axes:
    steps = [x for line in lines for x, _ in line.points]
    left = min(steps)
    right = max(steps)
    if right == left:
        right = left + 1
    return _Axes(left, right, bottom, top)


def _x_ticks(axes: _Axes) -> list[float]:
    """Round numbers within the x axis; and its beginning, where they leave much room there."""
    left = axes.left
    right = axes.right
    inside = [value for value in ticks(left, right) if left <= value <= right]
    if not inside:
        return [left]
    room = inside[0] - left
    if room > 0.15 * (right - left):
        inside.insert(0, left)
    return inside


def _drawn(line: Line, axes: _Axes) -> list[str]:
    """A line as it is; one of many points faintly, and its running mean over it."""
    parts = []
    points = line.points
    if len(points) >= MANY:
        parts.append(_polyline(points, axes, line.color, "raw"))
        points = smoothed(points, _span(line))
    parts.append(_polyline(points, axes, line.color, "mean"))
    if len(points) == 1:
        x, y = points[0]
        dot = _element("circle", cx=axes.x(x), cy=axes.y(y), r=3, style=f"fill:{line.color}")
        parts.append(dot)
    return parts


def _span(line: Line) -> int:
    """How many neighbors a running mean is over."""
    return len(line.points) // 30


def _polyline(points: Sequence[Point], axes: _Axes, color: str, kind: str) -> str:
    drawn = thinned(points, MOST)
    places = [f"{axes.x(x)},{axes.y(y)}" for x, y in drawn]
    return _element("polyline", points=" ".join(places), class_=kind, style=f"stroke:{color}")


def _legend(lines: Sequence[Line]) -> str:
    keys = []
    note = ""
    for line in lines:
        color = escape(line.color)
        label = escape(line.label)
        keys.append(f'<span><i style="background:{color}"></i>{label}</span>')
        if len(line.points) >= MANY:
            note = f"<span>thin: each logged step; thick: means of {_span(line)} of them</span>"
    return f'<p class="legend">{"".join(keys)}{note}</p>'


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
    labels, heights = _bars(values, whole, bins)
    highest = max(heights)
    y_ticks = [value for value in ticks(0, highest) if value == int(value)]
    top = max(highest, y_ticks[-1])
    axes = _Axes(0, len(heights), 0, top)
    parts = [_grid(axes, y_ticks), _y_name("groups")]
    every = _label_distance(labels)
    unit = INNER_WIDTH / len(heights)
    for number, label in enumerate(labels):
        height = heights[number]
        left = LEFT + number * unit
        parts.append(_bar(left, unit, height / top * INNER_HEIGHT, color, f"{label}: {height}"))
        if number % every == 0:
            parts.append(_x_tick(left + unit / 2, label))
    return _svg(parts, x_label, f"how many groups have which {x_label}")


def _label_distance(labels: Sequence[str]) -> int:
    """Of how many bars one is labeled, so that labels don't overlap."""
    if len(labels) <= 6:
        return 1
    longest = max(len(label) for label in labels)
    by_length = math.ceil(len(labels) * longest / 45)
    return max(math.ceil(len(labels) / 5), by_length)


def _bar(left: float, unit: float, height: float, color: str, title: str) -> str:
    """A bar in the middle of its `unit` of the x axis, with a title that shows under the pointer."""
    width = min(max(unit - 2, 1), BROADEST)
    x = left + (unit - width) / 2
    return _element(
        "rect",
        f"<title>{escape(title)}</title>",
        x=f"{x:.1f}",
        y=f"{BASE - height:.1f}",
        width=f"{width:.1f}",
        height=f"{height:.1f}",
        style=f"fill:{color}",
    )


def _bars(values: Sequence[float], whole: bool, bins: int) -> tuple[list[str], list[int]]:
    """`(labels, heights)`: a bar for each value if they are few, and else for ranges of one breadth."""
    shown = [_shown(value) for value in values]
    few = sorted(set(shown), key=float)
    if not whole and len(few) <= 6:
        return few, [shown.count(label) for label in few]
    low = min(values)
    step, count = _ranges(low, max(values), whole, bins)
    heights = [0] * count
    for value in values:
        bar = int((value - low) / step)
        heights[min(bar, count - 1)] += 1
    labels = []
    for number in range(count):
        start = low + number * step
        if whole and step > 1:
            labels.append(f"{start:.0f}–{start + step - 1:.0f}")
        else:
            labels.append(_shown(start))
    return labels, heights


def _ranges(low: float, high: float, whole: bool, bins: int) -> tuple[float, int]:
    """`(breadth, number)` of the ranges that cover `low` to `high`."""
    if whole:
        step = max(math.ceil((high - low + 1) / bins), 1)
        return float(step), math.ceil((high - low + 1) / step)
    breadth = (high - low) / bins
    if breadth == 0:
        return 1.0, 1
    return breadth, bins


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `low` to `high`, about `count` steps of them."""
    least = max(abs(low) * 1e-12, 1e-300)  # for a float to tell ticks apart
    if not high - low > least:
        high = low + max(abs(low) * 1e-9, 1)
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    steps = [factor * unit for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in steps if step >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def smoothed(points: Sequence[Point], span: int) -> list[Point]:
    """Each value's mean with its neighbors, `span` values in all and fewer at both ends."""
    values = np.array([y for _, y in points], dtype=np.float64)
    window = np.ones(max(span, 1))
    sums = np.convolve(values, window, "same")
    counts = np.convolve(np.ones_like(values), window, "same")
    means = (sums / counts).tolist()
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: the means of neighbors where there are more."""
    size = math.ceil(len(points) / most)
    kept = []
    for start in range(0, len(points), size):
        neighbors = points[start : start + size]
        x = sum(x for x, _ in neighbors) / len(neighbors)
        y = sum(y for _, y in neighbors) / len(neighbors)
        kept.append((x, y))
    return kept


def _shown(value: float, percent: bool = False) -> str:
    return f"{value:.0%}" if percent else f"{value:.4g}"


def _grid(axes: _Axes, values: Sequence[float], percent: bool = False) -> str:
    """A labeled horizontal line at each value."""
    parts = []
    for value in values:
        y = axes.y(value)
        rule = _element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        label = _element("text", escape(_shown(value, percent)), x=LEFT - 6, y=y + 4, text_anchor="end")
        parts += [rule, label]
    return "".join(parts)


def _x_tick(x: float, text: str) -> str:
    return _element("text", escape(text), x=f"{x:.1f}", y=BASE + UNDER, text_anchor="middle")


def _y_name(text: str) -> str:
    return _axis_label(4, 12, text)


def _axis_label(x: float, y: float, text: str, **attributes: str) -> str:
    return _element("text", escape(text), x=x, y=y, **attributes, class_="axis")


def _svg(parts: Sequence[str], x_label: str, title: str) -> str:
    middle = (LEFT + WIDTH) / 2
    label = _axis_label(middle, HEIGHT - 6, x_label, text_anchor="middle")
    return _element("svg", "".join(parts) + label, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)


def _element(name: str, content: str = "", **attributes: object) -> str:
    """An element of SVG.

    Args:
        name (`str`): Of the element.
        content (`str`): Markup inside it; texts in it are escaped.
        **attributes: `_` stands for `-`, and `class_` for `class`. Their values are escaped here.
    """
    words = [name]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        words.append(f'{attribute}="{escape(str(value))}"')
    start = " ".join(words)
    return f"<{start}>{content}</{name}>" if content else f"<{start}/>"
