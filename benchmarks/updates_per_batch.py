"""How many completions does replay save, with how many updates a batch, and at which learning rates?

    python benchmarks/updates_per_batch.py --screen   # the lists before training
    python benchmarks/updates_per_batch.py            # the runs of benchmarks/plans/updates_per_batch.md, in its order
    python benchmarks/updates_per_batch.py --left     # only prints which runs are left, and how long they take
    python benchmarks/updates_per_batch.py --collect  # only appends whole runs of --out to benchmarks/results
    python benchmarks/updates_per_batch.py --table    # only prints what there is

Tasks and model are those of when_it_pays.py, as is what must be installed. Its arms are run again, at the rates of its
pilots, so that all runs of a table are of one device. Runs append to updates_per_batch.jsonl in --out. Several
processes may share the queue.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import completions
import numpy as np
import when_it_pays as study
from when_it_pays import HELD_OUT_SEED, PILOT, Arm, Run, Task

import trl_replay
from trl_replay.errors import UnknownNameError

RESULTS = Path(__file__).parent / "results" / "updates_per_batch.jsonl"
LISTED, OTHERS = 48, 100
"""Prompts that come again, and held-out ones."""


def list_of(rows: Callable[[int, int], list[dict[str, str]]]) -> Task:
    """The task of a list: its prompts come again in an order of each seed, and others of their kind are held out."""

    def different(count: int, seed: int) -> list[dict[str, str]]:
        return list({row["prompt"]: row for row in rows(2 * count, seed)}.values())[:count]

    listed = different(LISTED, 7)

    def again(count: int, seed: int) -> list[dict[str, str]]:
        if seed == HELD_OUT_SEED:
            return different(count, seed)
        rng, found = random.Random(seed), list[dict[str, str]]()
        while len(found) < count:
            found += rng.sample(listed, LISTED)
        return found[:count]

    return Task(again, 4, 192, OTHERS, every=24, accuracy_every=24, listed=lambda: listed)


LISTS = {"listed sums": list_of(study._sums), "listed topics": list_of(study._topics)}
"""The second is run, as the plan chose."""
LONG = replace(study.TASKS["products"], batches=960)
"""Each prompt comes 40 times: what collapses?"""
TASKS = {"french": study.TASKS["french"], "products": study.TASKS["products"], **LISTS, "products, 40 passes": LONG}
PRESET: dict[str, Any] = {"replay_preset": "sample_efficient"}
STUDIED = ("stock", "stock, 2 updates", "sample_efficient")
CORRECTIONS = ("ratio", "m2po", "asymre", "oapl")
ARMS = {
    **{arm: study.ARMS[arm] for arm in STUDIED},
    "preset, 4 updates": Arm(PRESET, iterations=4, beta=0.1),
    "stock, 4 updates": Arm(None, iterations=4),
    "anchor, 2 updates": Arm({"replay_buffer_size": 0, "replay_kl": "all_wrong"}, iterations=2, beta=0.1),
    "preset, 4 updates, 4 uses": Arm({**PRESET, "replay_max_uses": 4}, iterations=4, beta=0.1),
    "preset, 4 updates, 12 uses": Arm({**PRESET, "replay_max_uses": 12}, iterations=4, beta=0.1),
    "stock, 2 updates, KL": study.ARMS["stock, 2 updates, KL"],
    "stock, KL 0.02": Arm(None, beta=0.02),
    "stock, KL 0.1": Arm(None, beta=0.1),
    **{f"preset, {name}": Arm({**PRESET, "replay_correction": name}, iterations=2, beta=0.1) for name in CORRECTIONS},
    "preset, no anchor": Arm({**PRESET, "replay_kl": "all"}, iterations=2),
    "preset, 1 update": Arm({**PRESET, "replay_iterations": "same"}, beta=0.1),
}


@dataclass(frozen=True)
class Stage:
    """Some runs of an arm on a task: pilots, then seeds at the best of their rates, or at the rate of another arm."""

    arm: str
    task: str
    rates: tuple[float, ...] = ()
    rate_of: str | None = None


FIRST = {"french": (4e-5, 2e-5), "products": (1e-5, 5e-6)}
"""The preset's rate at two updates, and half of it."""
STAGES = [
    Stage("preset, 4 updates", "french", (2e-5, 1e-5)),
    Stage("preset, 4 updates", "products", (5e-6, 3e-6)),
    Stage("stock, 4 updates", "french", (1e-5, 5e-6)),
    Stage("stock, 4 updates", "products", (2e-6, 1e-6)),
    *(Stage("anchor, 2 updates", task, rates) for task, rates in FIRST.items()),
    *(
        Stage(f"preset, 4 updates, {uses} uses", task, rate_of="preset, 4 updates")
        for task, uses in itertools.product(FIRST, (4, 12))
    ),
]
LATER_STAGES = [
    Stage("stock", "listed topics", (4e-5, 2e-5)),
    Stage("sample_efficient", "listed topics", (2e-5, 1e-5)),
    Stage("stock, 2 updates", "listed topics", (2e-5, 1e-5)),
    Stage("preset, 4 updates", "listed topics", (1e-5, 5e-6)),
    Stage("stock, 4 updates", "listed topics", (1e-5, 5e-6)),
    Stage("anchor, 2 updates", "listed topics", (2e-5, 1e-5)),
    *(
        Stage(arm, task, rates)
        for arm in (*(f"preset, {name}" for name in CORRECTIONS), "preset, no anchor", "preset, 1 update")
        for task, rates in FIRST.items()
    ),
]
COLLAPSE = {"stock": (3e-6, 6e-6), "sample_efficient": (1e-5, 2e-5), "stock, 2 updates": (3e-6, 6e-6)}
"""On products, 40 passes: the rate of the study, and twice it."""
CURVE = {"french": (8e-5, 4e-5, 2e-5, 1e-5, 5e-6), "products": (3e-5, 1e-5, 3e-6, 1e-6)}
CURVE_ARMS = ("stock", "sample_efficient", "stock, KL 0.02", "stock, 2 updates", "stock, KL 0.1")
SEEDS = (0, 1, 2)
MISSING = "–"
MINUTES = {"french": 6, "products": 7, "products, 40 passes": 35} | dict.fromkeys(LISTS, 10)
"""Of a core, for a run of stock; those of the lists are guessed."""


def exists(arm: Arm) -> bool:
    """Whether the arm's correction and plugins are installed."""
    settings = arm.settings or {}
    try:
        trl_replay.ReplayConfig(**settings)
    except UnknownNameError:
        return False
    return set(settings.get("replay_plugins", [])) <= entry_points(group="trl_replay").names


def finished(*paths: Path) -> dict[Run, list[dict[str, Any]]]:
    """The runs that are whole, in benchmarks/results and there."""
    there = study.ledger(RESULTS, *paths)
    known = {run: lines for run, lines in there.items() if run.task in TASKS and run.arm in ARMS}
    return {run: lines for run, lines in known.items() if study.is_whole(TASKS[run.task], lines[-1])}


def piloted_rate(done: dict[Run, list[dict[str, Any]]], stage: Stage) -> float | None:
    """The rate of the better pilot, of equal ones the lower; None before all are whole."""
    pilots = [Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates]
    if not pilots or not done.keys() >= set(pilots):
        return None
    return max(pilots, key=lambda run: (done[run][-1]["sampled"], -run.rate)).rate


def rate_of(done: dict[Run, list[dict[str, Any]]], stage: Stage) -> float | None:
    """That of its own pilots, or of the other arm's."""
    others = (other for other in STAGES if (other.arm, other.task) == (stage.rate_of, stage.task))
    return piloted_rate(done, next(others, stage))


def runs_of(done: dict[Run, list[dict[str, Any]]], stage: Stage) -> Iterator[Run]:
    """Those that can be said by now: the pilots, and the seeds when the rate is known."""
    yield from (Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates)
    rate = rate_of(done, stage)
    if rate is not None:
        yield from (Run(stage.task, stage.arm, rate, seed) for seed in SEEDS)


def studied() -> dict[tuple[str, str], float]:
    """By task and arm, the rates of the study's pilots."""
    rates = study.chosen_rates(study.finished())
    return {key: rates[key] for key in itertools.product(FIRST, STUDIED) if key in rates}


def queue(done: dict[Run, list[dict[str, Any]]]) -> Iterator[Run]:
    """All runs of the plan that can be said by now, in its order."""
    first = [stage for stage in STAGES if not stage.rate_of]
    for stage in first:
        yield from (Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates)
    for (task, arm), rate in studied().items():
        yield from (Run(task, arm, rate, seed) for seed in SEEDS)
    for stage in first:
        yield from runs_of(done, stage)
    for task, rates in CURVE.items():
        yield from (Run(task, arm, rate, seed) for arm, rate, seed in itertools.product(CURVE_ARMS, rates, SEEDS))
    for stage in STAGES:
        if stage.rate_of:
            yield from runs_of(done, stage)
    for stage in LATER_STAGES:
        if exists(ARMS[stage.arm]):
            yield from runs_of(done, stage)
    for arm, rates in COLLAPSE.items():
        yield from (Run("products, 40 passes", arm, rate, seed) for rate, seed in itertools.product(rates, SEEDS))


def left(path: Path) -> list[Run]:
    """The runs of the queue that are not whole."""
    done = finished(path)
    return [run for run in dict.fromkeys(queue(done)) if run not in done]


def hours(runs: list[Run]) -> float:
    """Of a core, by the study's minutes of stock."""
    return sum(MINUTES[run.task] * ARMS[run.arm].passes for run in runs) / 60


Whole = dict[str, tuple[float, list[list[dict[str, Any]]]]]


def at_their_rates(done: dict[Run, list[dict[str, Any]]], task: str) -> Whole:
    """The rate of each arm, and the lines of each seed, if all are whole: that of its pilots, or of the study's."""
    rates: dict[str, float | None] = {arm: rate for (of, arm), rate in studied().items() if of == task}
    rates |= {stage.arm: rate_of(done, stage) for stage in (*STAGES, *LATER_STAGES) if stage.task == task}
    found: Whole = {}
    for arm in ARMS:
        rate = rates.get(arm)
        runs = [Run(task, arm, rate, seed) for seed in SEEDS] if rate is not None else []
        if rate is not None and done.keys() >= set(runs):
            found[arm] = rate, [done[run] for run in runs]
    return found


def measured_at_their_rates(
    done: dict[Run, list[dict[str, Any]]], task: str, measure: str = "sampled"
) -> dict[str, tuple[float, list[completions.Measured]]]:
    """The same with the measurements of each run."""
    return {
        arm: (rate, [completions.Measured.of(lines, TASKS[task].batch, measure) for lines in runs])
        for arm, (rate, runs) in at_their_rates(done, task).items()
    }


def to_the_goal(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """A row a task and arm that is whole, as Markdown: completions to the final accuracy of stock on the same seed,
    with one update or two, whichever ends higher. Of lists, accuracy on other prompts, and then on the list's."""
    rows = completions.heading()
    for name, measure in [*((task, "sampled") for task in TASKS), *((task, "listed_sampled") for task in LISTS)]:
        task = TASKS[name]
        found = measured_at_their_rates(done, name, measure)
        stock = [found[arm][1] for arm in ("stock", "stock, 2 updates") if arm in found]
        goal = max(stock, key=lambda runs: sum(run.end for run in runs), default=None)
        for arm, (rate, runs) in found.items() if goal else ():
            savings = [completions.saving(*both) for both in zip(goal, runs, strict=True)]
            of = f"{name}, themselves" if measure.startswith("listed") else name
            rows.append(completions.row(of, arm, rate, savings, task.batch, ARMS[arm].passes))
    return rows


def savings_of(
    done: dict[Run, list[dict[str, Any]]], name: str, arm: str = "sample_efficient"
) -> list[completions.Saving]:
    """Of an arm with two updates, beside stock with one."""
    found = measured_at_their_rates(done, name)
    return [completions.saving(*both) for both in zip(found["stock"][1], found[arm][1], strict=True)]


def beside(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """A row a task and arm that is whole, as Markdown: means of the last lines."""
    rows = ["| task | arm | updates a batch | pass@8 | dead groups | entropy | found, not learned |", "|" + "---|" * 7]
    for task in TASKS:
        for arm, (_, runs) in at_their_rates(done, task).items():
            last = [lines[-1] for lines in runs]
            means = [
                np.mean([line[name] for line in last]) for name in ("pass_at_8", "frac_reward_zero_std", "entropy")
            ]
            missed = np.mean([len(set(line["found"]) - set(line["answers_right"])) for line in last])
            cells = [task, arm, str(ARMS[arm].iterations), *(f"{mean:.2f}" for mean in means), f"{missed:.1f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def curve(done: dict[Run, list[dict[str, Any]]], task: str) -> list[str]:
    """A row an arm that is whole at a rate, as Markdown: by rate, the mean accuracy at the end, and how many runs
    collapsed."""
    rates = CURVE[task][::-1]
    rows = [f"| {task} | {' | '.join(f'{rate:g}' for rate in rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for arm in (*CURVE_ARMS, "stock, 2 updates, KL"):
        ends = [_ends(done, task, arm, rate)[1] for rate in rates]
        if set(ends) != {MISSING}:
            rows.append(f"| {arm} | {' | '.join(ends)} |")
    return rows


def collapses(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """A row an arm and rate, as Markdown: the mean of the best measurements, and of the last ones."""
    rows = ["| products, 40 passes | rate | best | end |", "|---|---|---|---|"]
    for arm, rate in ((arm, rate) for arm, rates in COLLAPSE.items() for rate in rates):
        rows.append(f"| {arm} | {rate:g} | {' | '.join(_ends(done, 'products, 40 passes', arm, rate))} |")
    return rows


def _ends(done: dict[Run, list[dict[str, Any]]], task: str, arm: str, rate: float) -> tuple[str, str]:
    """The best, and the end and what collapsed; dashes while seeds are missing."""
    there = [run for seed in SEEDS if (run := Run(task, arm, rate, seed)) in done]
    if len(there) < len(SEEDS):
        return MISSING, MISSING
    values = [[line["sampled"] for line in done[run] if "sampled" in line] for run in there]
    collapsed = sum(of_run[-1] < max(of_run) / 2 for of_run in values)
    best, end = np.mean([(max(of_run), of_run[-1]) for of_run in values], axis=0)
    return f"{best:.2f}", f"{end:.2f}" + (f", {collapsed} collapsed" if collapsed else "")


def report(done: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """All tables, and what is missing."""
    missing = [run for run in dict.fromkeys(queue(done)) if run not in done]
    curves = itertools.chain(*(["", *curve(done, task)] for task in CURVE))
    told = f"{len(missing)} runs of those that are known by now are left: {hours(missing):.0f} hours of a core."
    return [*to_the_goal(done), "", *beside(done), *curves, "", *collapses(done), "", told]


def collect(path: Path) -> list[Run]:
    """Appends the runs of a ledger that are whole, and are not in benchmarks/results yet."""
    there, found = finished(), study.ledger(path)
    return study.collect(
        path, RESULTS, {run for run, of in found.items() if study.is_whole(TASKS[run.task], of[-1])} - there.keys()
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    options, path = study.command(arguments, __doc__, "updates_per_batch", "screen", "left", "collect")
    if options.screen:
        study.screen(options.out, LISTS)
    elif options.collect:
        print("\n".join(f"{run.name}: collected" for run in collect(path)))
    elif options.left:
        runs = left(path)
        print("\n".join([*(run.name for run in runs), f"{hours(runs):.0f} hours of a core"]))
    elif options.table:
        print("\n".join(report(finished(path))))
    else:
        study.train_all(
            lambda: left(path), options.out, lambda run: study.perform(run, TASKS[run.task], ARMS[run.arm], path)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
