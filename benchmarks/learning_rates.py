"""How forgiving is the learning rate? Accuracy at the end over it, stock and the preset, on a CPU; and what the preset
saves of stock's accuracy at its best rate.

The runs that the study made at its own rates (when_it_pays.py) are taken from its ledger, and are not run again. Arms,
rates, and seeds are those of plans/updates_per_batch.md, row 5.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import completions
import numpy as np
import updates_per_batch
import when_it_pays as study
from runs import PILOT, Done, Run, Study
from when_it_pays import Arm, is_whole

TASKS = ("products", "french")
PRODUCTS, FRENCH = (3e-6, 1e-5, 3e-5, 1e-6), (2e-5, 8e-5, 1e-5, 5e-6, 4e-5)
ARMS = {**study.ARMS, "stock, KL 0.02": Arm(None, beta=0.02)}
QUEUE: list[tuple[str, str, tuple[float, ...]]] = [
    ("products", "stock, 2 updates, KL", (3e-6, 1e-5, 1e-6)),
    ("products", "stock, 2 updates", (2e-6, 1e-6)),
    ("french", "stock, 2 updates", (1e-5, 4e-5, 5e-6)),
    *(
        (task, arm, rates)
        for task, rates in (("products", PRODUCTS), ("french", FRENCH))
        for arm in ("sample_efficient", "stock", "stock, KL 0.02")
    ),
]
"""Tasks, arms, and rates, those first that matter most."""
WORDS = ("none", "one", "two", "three", "four", "five")


def finished(*paths: Path) -> Done:
    """The runs that are whole, the study's and those of the curve."""
    return study.STUDY.finished() | STUDY.finished(*paths)


def queue(done: Done) -> Iterator[Run]:
    """All runs but the study's."""
    of_study = study.STUDY.finished()
    for task, arm, rates in QUEUE:
        runs = (Run(task, arm, rate, seed) for rate, seed in itertools.product(rates, updates_per_batch.SEEDS))
        yield from (run for run in runs if run not in of_study)


STUDY = Study("learning_rates", lambda run, line: is_whole(study.TASKS[run.task], line), queue)


def ends(done: Done, task: str, arm: str) -> dict[float, list[float]]:
    """Of each rate at which an arm is whole, the accuracy at the end, by seed."""
    found = {}
    for rate in sorted({run.rate for run in done if (run.task, run.arm) == (task, arm)}):
        runs = [Run(task, arm, rate, seed) for seed in updates_per_batch.SEEDS]
        if done.keys() >= set(runs):
            found[rate] = [done[run][-1]["sampled"] for run in runs]
    return found


def told(done: Done, task: str) -> str:
    """The sentence of docs/evidence.md."""

    def listed(values: Iterable[str]) -> str:
        *most, last = values
        return f"{', '.join(most)}, and {last}"

    stock, preset = ends(done, task, "stock"), ends(done, task, "sample_efficient")
    assert list(stock) == list(preset)
    means = [listed(f"{np.mean(values):.2f}" for values in of.values()) for of in (preset, stock)]
    return (
        f"at learning rates of {listed(f'{rate:g}' for rate in stock)}, it ends at {means[0]}, and stock at {means[1]}"
    )


def best_of(done: Done, task: str, arm: str = "stock") -> float:
    """The rate of the highest mean accuracy at the end."""
    means = {rate: float(np.mean(values)) for rate, values in ends(done, task, arm).items()}
    return max(means, key=means.__getitem__)


Pairs = list[tuple[completions.Measured, completions.Measured]]
"""Of each seed, what stock and the preset were measured to be."""


def paired(done: Done, task: str, rate: float, arm: str = "sample_efficient") -> Pairs:
    """Stock at the best of its rates, and another arm at one. Stock's is chosen after the runs that are compared,
    which favors stock."""
    arms = ("stock", best_of(done, task)), (arm, rate)

    def measured(run: Run) -> completions.Measured:
        return completions.Measured.of(done[run], study.TASKS[task].batch)

    return [tuple(measured(Run(task, *arm, seed)) for arm in arms) for seed in updates_per_batch.SEEDS]


def against_best(done: Done, task: str) -> dict[float, list[completions.Saving]]:
    """Of each rate of the preset, what it saves."""
    rates = ends(done, task, "sample_efficient")
    return {rate: [completions.saving(*pair) for pair in paired(done, task, rate)] for rate in rates}


def shown() -> dict[str, tuple[str, Pairs]]:
    """The task and the pairs of each row and panel of the README: lists on a CPU and on a GPU, and the tasks whose
    prompts are new. The preset is at the rate of its pilots, and stock at its best one."""
    rates, on_cpu, on_gpu = updates_per_batch.studied(), finished(), updates_per_batch.STUDY.finished()
    found = {}
    for task in study.AGAIN:
        for where, done in (("CPU", on_cpu), ("GPU", on_gpu)):
            found[f"{task}, {where}"] = task, paired(done, task, rates[task, "sample_efficient"])
    for task in sorted(study.TASKS.keys() - set(study.AGAIN), reverse=True):
        of_arms = study.measured_by_arm(study.STUDY.finished(), task)
        stock, preset = of_arms[study.GOALS.get(task, "stock")], of_arms["sample_efficient"]
        found[f"{task}, new"] = task, [(stock[seed], preset[seed]) for seed in sorted(stock)]
    return found


def control(done: Done, task: str) -> str:
    """Accuracy at the end of stock with two updates, with or without a KL term, at its best rate."""
    found: dict[tuple[str, float], list[float]] = {}
    for run, lines in done.items():
        if run.task == task and run.arm in ("stock, 2 updates", "stock, 2 updates, KL") and run.seed != PILOT:
            found.setdefault((run.arm, run.rate), []).append(lines[-1]["sampled"])
    means = [float(np.mean(values)) for values in found.values() if len(values) >= len(updates_per_batch.SEEDS)]
    return f"{max(means):.2f}, {len(means)} tried"


def slower(done: Done, task: str, rate: float) -> list[float]:
    """Of each seed, how many times as long a batch takes the preset as stock: of two steps and of one, which TRL has
    timed; medians over the run."""

    def step(run: Run) -> float:
        return float(np.median([line["step_time"] for line in done[run] if "step_time" in line]))

    best = best_of(done, task)
    return [
        2 * step(Run(task, "sample_efficient", rate, seed)) / step(Run(task, "stock", best, seed))
        for seed in updates_per_batch.SEEDS
    ]


def in_seconds(done: Done, task: str, rate: float) -> str:
    """Of stock's seconds to its final accuracy, how many the preset takes to it, as measured: by seed, the least
    first."""
    savings = [completions.saving(*pair) for pair in paired(done, task, rate)]
    shares = [saving.share * times for saving, times in zip(savings, slower(done, task, rate), strict=True)]
    return ", ".join("never" if share == np.inf else f"{share:.2f}" for share in sorted(shares))


def headline() -> list[str]:
    """The table of all tasks, as Markdown."""
    rows = [
        "| task | times fewer | of stock's seconds, by seed | accuracy, stock → preset | two updates alone |",
        "|---|---|---|---|---|",
    ]
    rates = updates_per_batch.studied()
    ledgers = {"CPU": finished(), "GPU": updates_per_batch.STUDY.finished(), "new": study.STUDY.finished()}
    for name, (task, pairs) in shown().items():
        savings = [completions.saving(*pair) for pair in pairs]
        ends_of = np.mean([(saving.end - saving.gain, saving.end) for saving in savings], axis=0)
        times = completions.times_fewer([saving.share for saving in savings])
        if times == "–":
            times = f"on {sum(saving.share < 1 for saving in savings)} of {len(savings)} seeds"
        done = ledgers[name.rpartition(" ")[2]]
        seconds = "–" if name.endswith("new") else in_seconds(done, task, rates[task, "sample_efficient"])
        end = f"{ends_of[0]:.2f} → {ends_of[1]:.2f}"
        rows.append(f"| {name} | {times} | {seconds} | {end} | {control(done, task)} |")
    return rows


def on_products(done: Done) -> str:
    """The README's sentences on its picture: where seeds end, and of how many rates each arm is at the best."""
    rate = best_of(done, "products")
    assert rate == best_of(done, "products", "sample_efficient")
    found = [ends(done, "products", arm) for arm in ("stock", "sample_efficient", "stock, 2 updates, KL")]
    stock, preset = (f"{min(arm[rate]):.2f} to {max(arm[rate]):.2f}" for arm in found[:2])
    completions_each = study.TASKS["products"].rollouts
    return (
        f"over 3 seeds, after {completions_each:,} completions, stock got {stock}, the preset {preset}. … "
        f"Both are at {rate:g}, the best of {len(found[0])} learning rates (orange: of {len(found[2])})."
    )


def table(done: Done) -> list[str]:
    """A row a task and a rate of the preset, as Markdown."""
    rows = [
        "| task | stock's best rate | the preset's rate | times fewer | get there | end |",
        "|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for rate, savings in against_best(done, task).items():
            there = sum(saving.share < np.inf for saving in savings)
            end = np.mean([saving.end for saving in savings])
            times = completions.times_fewer([saving.share for saving in savings])
            rows.append(
                f"| {task} | {best_of(done, task):g} | {rate:g} | {times} | {there} of {len(savings)} | {end:.2f} |"
            )
    return rows


def ranges(done: Done, task: str) -> str:
    """Between which values the preset ends over the rates, and stock, in words of README."""
    means = ([np.mean(of) for of in ends(done, task, arm).values()] for arm in ("sample_efficient", "stock"))
    preset, stock = (f"{min(of_arm):.2f} to {max(of_arm):.2f}" for of_arm in means)
    return f"at {preset}, and stock at {stock}"


def above(done: Done, task: str) -> str:
    """At how many rates the preset's mean accuracy at the end is above stock's at its best rate, in words."""
    best = np.mean(ends(done, task, "stock")[best_of(done, task)])
    means = [np.mean(values) for values in ends(done, task, "sample_efficient").values()]
    return f"{WORDS[sum(mean > best for mean in means)]} of {WORDS[len(means)]}"


def report(done: Done) -> list[list[str]]:
    """All tables."""
    done = study.STUDY.finished() | done
    return [*(updates_per_batch.curve(done, task) for task in TASKS), table(done), headline(), [on_products(done)]]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(
        __doc__, report, lambda run, path: study.perform(run, study.TASKS[run.task], ARMS[run.arm], path), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
