"""The pictures of the README: accuracy over completions, and at the end over the learning rate.

    python benchmarks/pictures.py

It draws completions.png, products.png, and learning_rates.png in benchmarks/results, from the ledgers there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import completions
import learning_rates
import numpy as np
import when_it_pays as study
from completions import Measured, picture

DRAWN = {"stock": "#666666", "sample_efficient": "#1a7f37"}
"""The arms of a picture, with their colors."""
ON_PRODUCTS = {
    "stock": ("stock", "#666666"),
    "stock, 2 updates, KL": ("2 updates, KL,\nno replay", "#b35900"),
    "sample_efficient": ("preset", "#1a7f37"),
}
BY_RATE = {"stock, KL 0.02": "#b35900", **DRAWN}


FONT = 19
"""Can be read on a phone in two columns."""


class Panel(NamedTuple):
    """A task of the picture.

    Attributes:
        title (`str`): What it is called.
        of_arms (`dict[str, list[Measured]]`): The runs of each arm, paired by seed.
        batch (`int`): Completions of a batch.
    """

    title: str
    of_arms: dict[str, list[Measured]]
    batch: int


def panels() -> Iterable[Panel]:
    """Lists, but *products* on a CPU, which has a picture of its own, and tasks whose prompts are new."""
    for name, (task, pairs) in learning_rates.shown().items():
        if name != "products, CPU":
            of_arms = dict(zip(DRAWN, map(list, zip(*pairs, strict=True)), strict=True))
            yield Panel(name, of_arms, study.TASKS[task].batch)


def draw_completions(path: Path) -> None:
    """Accuracy over completions: the mean of the seeds, and between which they lie."""
    with picture(path, 2, 3, font=FONT, figsize=(13.8, 8.4), sharey=True) as (figure, axes):
        for axis, panel in zip(axes.flat, panels(), strict=False):
            _draw_panel(axis, panel)
            axis.set_xlabel("completions")
        axes[-1, -1].set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel("accuracy")
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)


def draw_products(path: Path) -> None:
    """Accuracy over completions on *products* on a CPU: stock, stock with all that the README's lines set but replay,
    and the preset, each at the best of its rates; mean, and between which values the seeds lie."""
    with picture(path, font=FONT, figsize=(9, 4.2)) as (_, axis):
        done = learning_rates.finished()
        batch, seeds = study.TASKS["products"].batch, learning_rates.updates_per_batch.SEEDS
        named = []
        for arm, (name, color) in ON_PRODUCTS.items():
            rate = learning_rates.best_of(done, "products", arm)
            runs = [Measured.of(done[study.Run("products", arm, rate, seed)], batch) for seed in seeds]
            named.append((*_draw_runs(axis, runs, batch, color), name, color))
        _name_ends(axis, named, apart=0.13)  # a name has two lines
        title = f"24 prompts, SmolLM2-135M, {len(seeds)} seeds (bands: lowest to highest)"
        axis.set(xlabel="completions generated", ylabel="training accuracy", ylim=(0, 0.96), xlim=(0, named[0][0]))
        axis.set_title(title, fontsize=17)
        axis.axhline(named[0][1], color=ON_PRODUCTS["stock"][1], linewidth=1, linestyle="--")
        axis.annotate(
            "stock's end", (0, named[0][1]), (6, 5), textcoords="offset points", fontsize=15, color="#666666"
        )
        axis.spines[["top", "right"]].set_visible(False)


def _draw_runs(axis: Any, runs: list[Measured], batch: int, color: str) -> tuple[float, float]:
    """Draw the mean of an arm's runs, and between which values they lie; return where it ends."""
    measured = np.unique(np.concatenate([run.generated for run in runs]))  # not every seed at the same batches
    values = np.array([np.interp(measured, run.generated, run.values) for run in runs])
    completed, mean = batch * measured, values.mean(axis=0)
    axis.fill_between(completed, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axis.plot(completed, mean, color=color, linewidth=2.5)
    return completed[-1], mean[-1]


def _draw_panel(axis: Any, panel: Panel) -> None:
    named = []
    for arm, color in DRAWN.items():
        named.append((*_draw_runs(axis, panel.of_arms[arm], panel.batch, color), arm, color))
    _name_ends(axis, named)
    axis.axhline(named[0][1], color="#666666", linewidth=1, linestyle="--")
    _mark_crossings(axis, panel.of_arms, panel.batch)
    axis.set(title=panel.title, ylim=(0, 0.95), xlim=(0, named[0][0]))
    axis.spines[["top", "right"]].set_visible(False)


def _name_ends(axis: Any, named: Iterable[tuple[float, float, str, str]], apart: float = 0.08) -> None:
    """Name each line where it ends (its place, value, arm, and color), at least so far apart."""
    height = -apart
    for place, value, arm, color in sorted(named, key=lambda line: line[1]):
        height = max(value, height + apart)
        name = "preset" if arm == "sample_efficient" else arm
        axis.annotate(name, (place, height), (8, 0), textcoords="offset points", color=color, va="center")


def _mark_crossings(axis: Any, of_arms: dict[str, list[Measured]], batch: int) -> None:
    """Mark on the axis after how many completions each run first came to the final accuracy of stock's of its seed;
    one that never did has no mark. An arrow goes from stock's median to the preset's."""
    savings = [completions.saving(*runs) for runs in zip(of_arms["stock"], of_arms["sample_efficient"], strict=True)]
    firsts = {"stock": [saving.stock for saving in savings], "sample_efficient": [saving.arm for saving in savings]}
    medians = []
    for arm, color in DRAWN.items():
        places = [batch * spent.generated for spent in firsts[arm]]
        there = [place for place in places if np.isfinite(place)]
        axis.plot(there, [0.015] * len(there), "^", color=color, markersize=9, alpha=0.7, clip_on=False)
        medians.append(completions.middle(places))
    stock, preset = medians
    times = 1 / completions.middle([saving.share for saving in savings])
    color = DRAWN["sample_efficient"]
    if np.isfinite(preset):
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2}
        axis.annotate("", (preset, 0.07), (stock, 0.07), arrowprops=arrow)
        saved = f"{times:.1f} × fewer" if times >= 1.1 else "no clear saving"
        words = f"{saved}:\n{preset:,.0f} / {stock:,.0f}"
    else:
        there = sum(np.isfinite(saving.share) for saving in savings)
        words = f"not reached on\n{len(savings) - there} of {len(savings)} seeds"
    axis.annotate(words, (0.97, 0.11), xycoords="axes fraction", color=color, ha="right")


def draw_rates(path: Path) -> None:
    """Accuracy at the end over the learning rate: the mean of the seeds, and between which they lie. A task is drawn
    once stock has two rates."""
    done = learning_rates.finished()
    tasks = [task for task in learning_rates.TASKS if len(learning_rates.ends(done, task, "stock")) > 1]
    shape = {"figsize": (9, 4.8 * len(tasks)), "squeeze": False, "sharey": True}
    with picture(path, len(tasks), font=FONT, **shape) as (figure, axes):
        for axis, task in zip(axes.flat, tasks, strict=True):
            named = []
            for arm, color in BY_RATE.items():
                found = learning_rates.ends(done, task, arm)
                if len(found) < 2:
                    continue
                rates, values = list(found), np.array(list(found.values()))
                axis.fill_between(rates, values.min(axis=1), values.max(axis=1), color=color, alpha=0.2, linewidth=0)
                axis.plot(rates, values.mean(axis=1), "o-", color=color, linewidth=2.5, markersize=8)
                named.append((rates[-1], values[-1].mean(), arm, color))
            _name_ends(axis, named)
            rates = list(learning_rates.ends(done, task, "stock"))
            axis.set(title=f"{task}, 3 seeds", xscale="log", ylim=(0, 1), ylabel="accuracy at the end")
            axis.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1, 0].set_xlabel("learning rate")
        figure.get_layout_engine().set(h_pad=0.15)


if __name__ == "__main__":
    results = Path(__file__).parent / "results"
    draw_completions(results / "completions.png")
    draw_products(results / "products.png")
    draw_rates(results / "learning_rates.png")
