"""What runs that are compared show: the difference of two settings, its standard error, and completions saved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...base.sizes import counted
from ..advice.logged import SUM, at_ends, functions
from .crossing import Curve, Saved, median_and_range, saved
from .runs import AXES, TOKENS, UPDATES, Measure, Run

ENOUGH = 3
"""Runs of each label without which the page says that nothing is proven."""
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors of a 95 % interval, by degrees of freedom from 1 on."""
ALIKE, ALIKE_IN_TOKENS = 1.05, 1.5
"""Ratio of lengths up to which runs count as equally long. Completions of one setting may be longer."""
UNPROVEN = (
    f"This proves nothing yet: seeds of one setting can differ as much as settings do. Train each setting with at "
    f"least {ENOUGH} seeds, better 5, on as many completions, at a learning rate chosen for it on other seeds, and "
    "give runs of one setting one label: label=folder."
)


class Difference(NamedTuple):
    """Final values of one setting over another's.

    Attributes:
        mean (`float`): Of the second minus the first.
        error (`float`): Its standard error; NaN where a setting has one run alone.
        interval (`tuple[float, float]`): In which it lies with a confidence of 95 %.
        pairs (`int`): Runs that pair by their seeds; 0 where they do not.
        higher (`int`): Pairs in which the setting that ends higher on average does.
    """

    mean: float
    error: float
    interval: tuple[float, float]
    pairs: int
    higher: int = 0

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval[0] > 0 or self.interval[1] < 0


def difference(first: Sequence[Run], second: Sequence[Run], key: str) -> Difference:
    """Compare final values of two settings, seed by seed where both have the same seeds."""
    ends = [np.array([run.final(key) for run in runs]) for runs in (first, second)]
    mean = float(ends[1].mean() - ends[0].mean())
    both, higher = pairs(first, second), 0
    if both:
        gains = np.array([after.final(key) - before.final(key) for before, after in both])
        error, freedom = float(gains.std(ddof=1)) / math.sqrt(len(gains)), float(len(gains) - 1)
        higher = int((gains * (1 if mean >= 0 else -1) > 0).sum())
    elif min(len(first), len(second)) > 1:
        parts = np.array([end.var(ddof=1) / len(end) for end in ends])  # Welch's
        error = math.sqrt(parts.sum())
        shares = (parts**2 / [len(end) - 1 for end in ends]).sum()
        freedom = float(parts.sum() ** 2 / shares) if shares else float(min(len(first), len(second)) - 1)
    else:
        return Difference(mean, math.nan, (-math.inf, math.inf), 0)
    reach = quantile(freedom) * error
    return Difference(mean, error, (mean - reach, mean + reach), len(both), higher)


def pairs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of two settings seed by seed; none unless both have the same seeds, two at least."""
    seeds = {run.seed: run for run in first}
    again = {run.seed: run for run in second}
    if None in seeds or seeds.keys() != again.keys() or not len(seeds) == len(first) == len(second) > 1:
        return []
    return [(run, again[seed]) for seed, run in seeds.items()]


def quantile(freedom: float) -> float:
    """Return how many standard errors a 95 % interval reaches on each side, by Student's t; a little too many beyond
    10 degrees of freedom."""
    return T_95[int(freedom) - 1] if freedom < len(T_95) + 1 else 1.96 + 2.72 / freedom


class ToEnd(NamedTuple):
    """What two settings took to the lower one's end value.

    Attributes:
        level (`float`): That value, a mean over seeds.
        high, low (`str`): The labels of the settings, the one with the higher end first.
        axis (`int`): Which of `AXES`.
        found (`list[Saved]`): Seed by seed, where the lower one rose; where seeds do not pair, one for the means of
            both.
        flat (`int`): Seeds that are left out, for the lower one did not rise.
    """

    level: float
    high: str
    low: str
    axis: int
    found: list[Saved]
    flat: int


def to_end(first: Sequence[Run], second: Sequence[Run], key: str) -> ToEnd | None:
    """Return what two settings took to the lower one's end value; None where its mean does not rise more than its last
    values scatter."""
    axis = common_axis([*first, *second], key)
    means = [mean_curve(runs, key, axis) for runs in (first, second)]
    high, low = ((second, first), (first, second))[means[1].end < means[0].end]
    of_high, of_low = (mean_curve(runs, key, axis) for runs in (high, low))
    if not _rose(of_low):
        return None
    seeds = [(one.curve(key, axis), other.curve(key, axis)) for one, other in pairs(high, low)]
    rising = [(one, other) for one, other in seeds if _rose(other)]
    found = [saved(one, other) for one, other in rising or [(of_high, of_low)]]
    return ToEnd(of_low.end, high[0].label, low[0].label, axis, found, len(seeds) - len(rising) if rising else 0)


def _rose(curve: Curve) -> bool:
    """Whether a curve ends above its beginning by more than its last values scatter."""
    last = curve.values[-at_ends(len(curve.values)) :]
    return bool(curve.end - curve.values[0] > np.std(last))


def mean_curve(runs: Sequence[Run], key: str, axis: int) -> Curve:
    """Return the mean of a metric over runs, along an axis as far as all of them went."""
    curves = [run.curve(key, axis) for run in runs]
    begin, end = max(curve.completions[0] for curve in curves), min(curve.completions[-1] for curve in curves)
    places = np.unique(np.concatenate([curve.completions for curve in curves]))
    places = places[(places >= begin) & (places <= end)]
    if not len(places):  # runs that have no place in common
        places = np.array([end])
    means = np.mean([np.interp(places, curve.completions, curve.values) for curve in curves], axis=0)
    return Curve(places.tolist(), means.tolist())


def told(arms: Sequence[Sequence[Run]], measure: Measure) -> list[str]:
    """Tell how the first setting and each other one differ by what counts, in sentences.

    Args:
        arms (`Sequence[Sequence[Run]]`): The runs of each label.
        measure ([`Measure`]): What they are judged by.
    """
    runs = [run for arm in arms for run in arm]
    if not measure.given and (by_each := _by_each(arms, measure)):
        return by_each
    said, words = (
        [],
        "the sum of the rewards" if len(functions(runs[0].log)) > 1 and measure.name == SUM else measure.words,
    )
    if all(run.logs(measure.evaluated) for run in runs):
        said += [f"On evaluation prompts: {each}" for each in _pairs(arms, measure.evaluated, words)]
    elif some := [run.label for run in runs if run.logs(measure.evaluated)]:
        said.append(f"Only {', '.join(dict.fromkeys(some))} logged evaluations, so they are not compared.")
    trained = _pairs(arms, measure.key, words)
    said += [f"On prompts of training: {each}" for each in trained] if said else trained
    said += _unequal(arms, measure.key)
    return said if min(map(len, arms)) >= ENOUGH else [*said, UNPROVEN]


def _unequal(arms: Sequence[Sequence[Run]], key: str) -> list[str]:
    """Say so where settings trained for different lengths."""
    runs = [run for arm in arms for run in arm]
    axis = common_axis(runs, key)
    lengths = [float(np.mean([run.series(key)[0][axis][-1] for run in arm])) for arm in arms]
    if max(lengths) <= (ALIKE_IN_TOKENS if axis == TOKENS else ALIKE) * min(lengths):
        return []
    each = ", ".join(f"{arm[0].label} {length:,.0f}" for arm, length in zip(arms, lengths, strict=True))
    unit = AXES[axis].partition(" ")[0]
    return [f"The settings did not train for the same number of {unit} ({each}): the ends do not compare."]


def common_axis(runs: Sequence[Run], key: str) -> int:
    """Return which of `AXES` runs are compared along: tokens where not all tell their completions, updates where not
    all tell those. A batch may take several updates."""
    of_runs = [run.series(key)[0] for run in runs]
    return next((axis for axis in range(UPDATES) if all(np.isfinite(axes[axis]).all() for axes in of_runs)), UPDATES)


def _by_each(arms: Sequence[Sequence[Run]], measure: Measure) -> list[str]:
    """Tell how settings end by every function, where several were logged and nobody says which one counts."""
    runs = [run for arm in arms for run in arm]
    names = [name for name in functions(runs[0].log) if all(run.logs(f"rewards/{name}/mean") for run in runs)]
    if len(names) < 2:
        return []
    keys = {"the sum": measure.key, **{name: f"rewards/{name}/mean" for name in names}}
    ends = "; ".join(f"by {name}, {_ends(arms, key)}" for name, key in keys.items())
    text = (
        f"Several reward functions were logged, and nothing says which one counts. At the end: {ends}. Name the one "
        f"that you train for, and the page judges by it: --reward {names[0]}."
    )
    return [text]


def _ends(arms: Sequence[Sequence[Run]], key: str) -> str:
    return ", ".join(f"{arm[0].label} {_mean_end(arm, key):.3g}" for arm in arms)


def _mean_end(runs: Sequence[Run], key: str) -> float:
    return float(np.mean([run.final(key) for run in runs]))


def _pairs(arms: Sequence[Sequence[Run]], key: str, words: str) -> list[str]:
    first, *others = arms
    return [_compared(first, other, key, words) for other in others] or [
        f"At the end, by {words}: {_ends(arms, key)}."
    ]


def _compared(first: Sequence[Run], second: Sequence[Run], key: str, words: str) -> str:
    """One setting against another, in words."""
    found = difference(first, second, key)
    high, low, sign = (second, first, 1) if found.mean >= 0 else (first, second, -1)
    counts = f"means of {len(high)} and {counted(len(low), 'run')}"
    if len(high) == len(low):
        counts = "one run each" if len(low) == 1 else f"means of {len(low)} runs each"
    ends = f"{_mean_end(high, key):.3g} and {_mean_end(low, key):.3g}, {counts}"
    text = f"By {words}, {high[0].label} ends {abs(found.mean):.3g} above {low[0].label} ({ends})."
    if not math.isnan(found.error):
        least, most = sorted(sign * bound for bound in found.interval)
        seeds = f"higher on {found.higher} of {found.pairs} seeds" if found.pairs else "seeds do not pair"
        clear = "The difference is clear" if found.clear else "That may be chance"
        text += (
            f" {clear}: {abs(found.mean):.3g} ± {found.error:.2g} (standard error; {seeds}), with 95 % confidence "
            f"{least:.3g} to {most:.3g}."
        )
    return f"{text} {_saved(first, second, key)}"


def _saved(first: Sequence[Run], second: Sequence[Run], key: str) -> str:
    """What it took both to the lower one's end value, in words."""
    found = to_end(first, second, key)
    if found is None:
        return "The lower one did not rise, so there is no value to which completions could be counted."
    unit = AXES[found.axis].partition(" ")[0]
    high = median_and_range([one.to_end for one in found.found])
    low = median_and_range([one.own for one in found.found])
    goal = f"({found.level:.3g})" if len(found.found) == 1 else f"on each seed ({found.level:.3g} on average)"
    text = f"To the value at which {found.low} ends {goal}, {found.high} took {high} {unit} and {found.low} {low}: "
    text += f"{_shares(found)}."
    if found.flat:
        text += f" Without {counted(found.flat, 'pair')} of seeds in which {found.low} did not rise."
    if found.axis:
        text += (
            f" Not all logs count completions, so {unit} are compared: to compare completions, give those of an "
            "update with --completions."
        )
    return text


def _shares(found: ToEnd) -> str:
    """What the higher one saved, in words."""
    shares = [1 - one.to_end / one.own for one in found.found]
    share, count = statistics.median(shares), len(shares)
    if count > 1:
        ends = f"{_fewer(min(shares))} to {_fewer(max(shares))}"
        return f"{_fewer(share)} in the median of {count} pairs of seeds ({ends})"
    return _fewer(share) if share >= 0 else f"{found.low} was there first, and then overtaken"


def _fewer(share: float) -> str:
    """A share that is saved, in words."""
    if math.isinf(share):
        return "never there"
    percent = round(100 * share)
    return f"{abs(percent)}% {'fewer' if percent > 0 else 'more'}" if percent else "as many"
