"""Completions to a level: where a curve first crosses it, and how many fewer than another run's curve that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """What one run had reached, by the completions that it had generated.

    Attributes:
        completions (`Sequence[float]`): Generated up to each measurement, ascending.
        values (`Sequence[float]`): What was measured there, such as accuracy.
    """

    completions: Sequence[float]
    values: Sequence[float]

    @property
    def end(self) -> float:
        """The last value."""
        return self.values[-1]

    def first(self, level: float) -> float:
        """Return the completions at the first crossing of a level, by a straight line between the two measurements
        around it; infinity if it is never reached."""
        at = next((place for place, value in enumerate(self.values) if value >= level), None)
        if at is None:
            return np.inf
        if at == 0:
            return float(self.completions[0])
        (x, low), (further, high) = zip(self.completions[at - 1 : at + 1], self.values[at - 1 : at + 1], strict=True)
        return float(x + (further - x) * (level - low) / (high - low))


class Saved(NamedTuple):
    """What one run took to the end of another of the same seed.

    Attributes:
        to_end (`float`): Completions at its first crossing of the other's last value; infinity if it has none.
        own (`float`): The other's own first crossing of that value, which a plateau puts before its end.
        whole (`float`): All completions of the other.
        ends (`tuple[float, float]`): The last values of both.
    """

    to_end: float
    own: float
    whole: float
    ends: tuple[float, float]


def saved(curve: Curve, stock: Curve) -> Saved:
    """Compare a run with one of stock on the same seed."""
    return Saved(curve.first(stock.end), stock.first(stock.end), stock.completions[-1], (curve.end, stock.end))


def median_and_range(values: Sequence[float]) -> str:
    """Describe numbers of completions: `"1,856 (1,376 to 2,944)"`, `"never"` where most are infinite."""
    low, high = (_counted(value) for value in (min(values), max(values)))
    median = _counted(middle(values))
    return median if low == high else f"{median} ({low} to {high})"


def saved_table(curves: Mapping[tuple[str, int], Curve], stock: str = "stock") -> list[str]:
    """A row an arm, as Markdown, paired by seed: completions to stock's final value, stock's own first crossing beside
    it, the ratio of the two, and both ends.

    Args:
        curves (`Mapping`): By label and seed.
        stock (`str`): The label of the arm that the others are compared with.
    """
    rows = ["| completions to stock's final value | seeds | stock itself | times fewer | end | stock's end |"]
    rows.append("|---|---|---|---|---|---|")
    for label in dict.fromkeys(label for label, _ in curves if label != stock):
        seeds = [seed for of, seed in curves if of == label and (stock, seed) in curves]
        found = [saved(curves[label, seed], curves[stock, seed]) for seed in seeds]
        if not found:
            continue
        times = [one.own / one.to_end if one.to_end else np.inf for one in found]
        ends = np.mean([one.ends for one in found], axis=0)
        cells = [
            f"{label}: {median_and_range([one.to_end for one in found])}",
            str(len(found)),
            median_and_range([one.own for one in found]),
            f"{middle(times):.1f} ({min(times):.1f} to {max(times):.1f})",
            *(f"{end:.2f}" for end in ends),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def middle(values: Sequence[float]) -> float:
    """The median; infinity where it lies between a number and infinity."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return high if np.isinf(high) else (low + high) / 2


def _counted(value: float) -> str:
    return "never" if np.isinf(value) else f"{value:,.0f}"
