"""How many completions does replay save, with how many updates a batch, and at which learning rates?

Tasks and model are those of when_it_pays.py, as is what must be installed. Its arms are run again, at the rates of its
pilots, so that all runs of a table are of one device. Of plans/updates_per_batch.md, these are rows 1 to 3, and stock
on french of row 5.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import completions
import numpy as np
import when_it_pays as study
from runs import PILOT, Done, Lines, Run, Study
from when_it_pays import Arm, is_whole

TASKS = {task: study.TASKS[task] for task in study.AGAIN}
PRESET: dict[str, Any] = {"replay_preset": "sample_efficient"}
STUDIED = ("stock", "stock, 2 updates", "sample_efficient")
ARMS = {
    **{arm: study.ARMS[arm] for arm in STUDIED},
    "preset, 4 updates": Arm(PRESET, iterations=4, beta=0.1),
    "stock, 4 updates": Arm(None, iterations=4),
    "anchor, 2 updates": Arm({"replay_buffer_size": 0, "replay_kl": "all_wrong"}, iterations=2, beta=0.1),
}


@dataclass(frozen=True)
class Stage:
    """Some runs of an arm on a task: pilots, then seeds at the best of their rates."""

    arm: str
    task: str
    rates: tuple[float, ...]


STAGES = [
    Stage("preset, 4 updates", "french", (2e-5, 1e-5)),
    Stage("preset, 4 updates", "products", (5e-6, 3e-6)),
    Stage("stock, 4 updates", "french", (1e-5, 5e-6)),
    Stage("stock, 4 updates", "products", (2e-6, 1e-6)),
    Stage("anchor, 2 updates", "french", (4e-5, 2e-5)),
    Stage("anchor, 2 updates", "products", (1e-5, 5e-6)),
]
CURVE = {"french": (8e-5, 4e-5, 2e-5, 1e-5, 5e-6), "products": (3e-5, 1e-5, 3e-6, 1e-6)}
CURVE_ARMS = ("stock", "sample_efficient", "stock, KL 0.02", "stock, 2 updates", "stock, 2 updates, KL")
SEEDS = (0, 1, 2)
MISSING = "–"


def pilots(stage: Stage) -> list[Run]:
    """One a rate."""
    return [Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates]


def rate_of(done: Done, stage: Stage) -> float | None:
    """The rate of the better pilot, of equal ones the lower; None before all are whole."""
    if not done.keys() >= set(pilots(stage)):
        return None
    return max(pilots(stage), key=lambda run: (done[run][-1]["sampled"], -run.rate)).rate


def studied() -> dict[tuple[str, str], float]:
    """By task and arm, the rates of the study's pilots."""
    rates = study.chosen_rates(study.STUDY.finished())
    return {key: rates[key] for key in itertools.product(TASKS, STUDIED) if key in rates}


def queue(done: Done) -> Iterator[Run]:
    """All runs of the plan that can be said by now, in its order."""
    yield from itertools.chain(*map(pilots, STAGES))
    rates = studied() | {(stage.task, stage.arm): rate for stage in STAGES if (rate := rate_of(done, stage))}
    for (task, arm), rate in rates.items():
        yield from (Run(task, arm, rate, seed) for seed in SEEDS)
    yield from (Run("french", "stock", rate, seed) for rate, seed in itertools.product(CURVE["french"], SEEDS))


STUDY = Study("updates_per_batch", lambda run, line: is_whole(TASKS[run.task], line), queue)
Whole = dict[str, tuple[float, list[Lines]]]


def at_their_rates(done: Done, task: str) -> Whole:
    """The rate of each arm, and the lines of each seed, if all are whole: that of its pilots, or of the study's."""
    rates: dict[str, float | None] = {arm: rate for (of, arm), rate in studied().items() if of == task}
    rates |= {stage.arm: rate_of(done, stage) for stage in STAGES if stage.task == task}
    found: Whole = {}
    for arm in ARMS:
        rate = rates.get(arm)
        runs = [Run(task, arm, rate, seed) for seed in SEEDS] if rate is not None else []
        if rate is not None and done.keys() >= set(runs):
            found[arm] = rate, [done[run] for run in runs]
    return found


def measured_at_their_rates(done: Done, task: str) -> dict[str, tuple[float, list[completions.Measured]]]:
    """The same with the measurements of each run."""
    return {
        arm: (rate, [completions.Measured.of(lines, TASKS[task].batch) for lines in runs])
        for arm, (rate, runs) in at_their_rates(done, task).items()
    }


def to_the_goal(done: Done) -> list[str]:
    """A row a task and arm that is whole, as Markdown: completions to the final accuracy of stock on the same seed,
    with one update or two, whichever ends higher."""
    rows = completions.heading()
    for name, task in TASKS.items():
        found = measured_at_their_rates(done, name)
        stock = [found[arm][1] for arm in ("stock", "stock, 2 updates") if arm in found]
        goal = max(stock, key=lambda runs: sum(run.end for run in runs), default=None)
        for arm, (rate, runs) in found.items() if goal else ():
            savings = [completions.saving(*both) for both in zip(goal, runs, strict=True)]
            rows.append(completions.row(name, arm, rate, savings, task.batch, ARMS[arm].passes))
    return rows


def savings_of(done: Done, name: str, arm: str = "sample_efficient") -> list[completions.Saving]:
    """Of an arm with two updates, beside stock with one."""
    found = measured_at_their_rates(done, name)
    return [completions.saving(*both) for both in zip(found["stock"][1], found[arm][1], strict=True)]


def beside(done: Done) -> list[str]:
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


def curve(done: Done, task: str) -> list[str]:
    """A row an arm that is whole at a rate, as Markdown: by rate, the mean accuracy at the end, and how many runs
    collapsed."""
    rates = CURVE[task][::-1]
    rows = [f"| {task} | {' | '.join(f'{rate:g}' for rate in rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for arm in CURVE_ARMS:
        ends = [_end(done, task, arm, rate) for rate in rates]
        if set(ends) != {MISSING}:
            rows.append(f"| {arm} | {' | '.join(ends)} |")
    return rows


def _end(done: Done, task: str, arm: str, rate: float) -> str:
    """The mean, and what collapsed; a dash while seeds are missing."""
    there = [run for seed in SEEDS if (run := Run(task, arm, rate, seed)) in done]
    if len(there) < len(SEEDS):
        return MISSING
    values = [[line["sampled"] for line in done[run] if "sampled" in line] for run in there]
    collapsed = sum(of_run[-1] < max(of_run) / 2 for of_run in values)
    return f"{np.mean([of_run[-1] for of_run in values]):.2f}" + (f", {collapsed} collapsed" if collapsed else "")


def report(done: Done) -> list[list[str]]:
    """All tables."""
    return [to_the_goal(done), beside(done), curve(done, "french")]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(
        __doc__, report, lambda run, path: study.perform(run, TASKS[run.task], ARMS[run.arm], path), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
