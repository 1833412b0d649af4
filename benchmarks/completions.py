"""Completions to stock's final accuracy: what an arm saves, and what that is in hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_replay.extras.outcome.run import Curve

COSTS = (0.2, 1, 5, 20)
"""Generation of a batch, in training passes over it."""


def mean_and_error(values: Sequence[float]) -> str:
    """The mean, and its standard error if there are several values."""
    error = f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.3f}{error}".replace("-", "−")


def paired(by_seed: dict[int, float], of_stock: dict[int, float]) -> str:
    """The mean difference to stock with the same seeds, and its standard error."""
    differences = [value - of_stock[seed] for seed, value in by_seed.items() if seed in of_stock]
    return "–" if len(differences) < 2 or by_seed == of_stock else mean_and_error(differences)


def median_and_range(values: Sequence[float]) -> str:
    """Describe numbers of completions: `"1,856 (1,376 to 2,944)"`, `"never"` where most are infinite."""
    low, median, high = (
        "never" if value == inf else f"{value:,.0f}" for value in (min(values), middle(values), max(values))
    )
    return median if low == high else f"{median} ({low} to {high})"


def middle(values: Sequence[float]) -> float:
    """The median; infinity where it lies between a number and infinity."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return high if high == inf else (low + high) / 2


class Spent(NamedTuple):
    """Completions, in batches, that were generated, and batches that were trained on: dynamic sampling generates
    more. Infinite for what is never reached."""

    generated: float
    trained: float

    def hours(self, passes: float, cost: float) -> float:
        """In training passes over a batch."""
        return cost * self.generated + passes * self.trained


class Measured(NamedTuple):
    """What a run was measured to be, and where."""

    generated: Sequence[float]
    trained: Sequence[float]
    values: Sequence[float]

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], batch: int, measure: str = "sampled") -> Measured:
        """Those of a ledger's lines; the first lines of the study's have no `rollouts`."""
        there = [line for line in lines if measure in line]
        generated = [line["rollouts"] / batch if "rollouts" in line else line["batch"] for line in there]
        return cls(generated, [line["batch"] for line in there], [line[measure] for line in there])

    @property
    def end(self) -> float:
        """The last value."""
        return self.values[-1]

    def first(self, goal: float) -> Spent:
        """At the first crossing."""
        return Spent(Curve(self.generated, self.values).first(goal), Curve(self.trained, self.values).first(goal))


@dataclass(frozen=True)
class Saving:
    """An arm beside stock, on one seed: where both first are at stock's final value, and how far apart they end."""

    stock: Spent
    arm: Spent
    end: float
    gain: float
    is_lost: bool
    """Whether the arm was there, and was not at its end: then it never is."""

    @property
    def share(self) -> float:
        """Of stock's completions."""
        return _share(self.arm.generated, self.stock.generated)

    def hours(self, passes: float, cost: float) -> float:
        """In shares of those of stock, which trains once on a batch."""
        return _share(self.arm.hours(passes, cost), self.stock.hours(1, cost))


def _share(of_arm: float, of_stock: float) -> float:
    """Where stock is there before it is trained, nothing can be saved."""
    return of_arm / of_stock if of_stock else of_arm or 1.0


def break_even(savings: Sequence[Saving], passes: float) -> float:
    """Generation of a batch, in training passes, from which on the median run takes fewer hours than stock."""
    share = middle([saving.share for saving in savings])
    return max(0.0, (share * passes - 1) / (1 - share)) if share < 1 else inf


def saving(stock: Measured, arm: Measured) -> Saving:
    """By stock's final value, which stock itself may have reached before its end."""
    found, gain = arm.first(stock.end), arm.end - stock.end
    is_lost = gain < 0 and found.generated < inf
    return Saving(stock.first(stock.end), Spent(inf, inf) if gain < 0 else found, arm.end, gain, is_lost)


def heading() -> list[str]:
    """The head of the table."""
    names = "task | arm | rate | completions | stock's own | times fewer | get there | end | minus stock's"
    costs = " | ".join(f"μ = {cost:g}" for cost in COSTS)
    rule = "---|" * (9 + len(COSTS))
    return ["Completions to stock's final accuracy:", "", f"| {names} | hours: {costs} |", f"|{rule}"]


def row(task: str, arm: str, rate: float, savings: Sequence[Saving], batch: int, passes: float) -> str:
    """A row of the table, as Markdown: medians over seeds, with ranges but for hours."""
    count, lost = len(savings), sum(saving.is_lost for saving in savings)
    cells = [
        task,
        arm,
        f"{rate:g}",
        median_and_range([batch * saving.arm.generated for saving in savings]),
        median_and_range([batch * saving.stock.generated for saving in savings]),
        times_fewer([saving.share for saving in savings]),
        f"{sum(saving.arm.generated < inf for saving in savings)} of {count}" + (f", {lost} lost it" if lost else ""),
        f"{sum(saving.end for saving in savings) / count:.2f}",
        mean_and_error([saving.gain for saving in savings]),
        *(or_dash(middle([saving.hours(passes, cost) for saving in savings]), "{:.2f}".format) for cost in COSTS),
    ]
    return f"| {' | '.join(cells)} |"


def times_fewer(shares: Sequence[float]) -> str:
    """By shares of completions: the median, and the range."""

    def told(share: float) -> str:
        return "never" if share == inf else f"{1 / share:.1f}" if share else "all"

    ends, median = (told(max(shares)), told(min(shares))), middle(shares)
    return f"{told(median)} ({ends[0]} to {ends[1]})" if ends[0] != ends[1] and median < inf else or_dash(median, told)


def or_dash(value: float, told: Callable[[float], str]) -> str:
    """A number; a dash for never, which the completions say."""
    return "–" if value == inf else told(value)


@contextmanager
def picture(path: Path, *shape: int, dpi: int = 100, font: int = 14, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are drawn into a file; its letters can be read on a phone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.size"] = font
    figure, axes = pyplot.subplots(*shape, layout="constrained", **settings)
    yield figure, axes
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
