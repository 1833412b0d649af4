"""How many completions does replay save, with how many updates a batch, and at which learning rates?

    python benchmarks/updates_per_batch.py --screen   # the two lists with held-out siblings, before training
    python benchmarks/updates_per_batch.py            # the runs of docs/evidence-ratio-plan.md, in its order
    python benchmarks/updates_per_batch.py --left     # only prints which runs are left

Tasks, model, and ledger are those of when_it_pays.py, as is what must be installed; what stands in its ledger is not
run again. Runs append to updates_per_batch.jsonl in --out. Several processes may share the queue.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import when_it_pays as study
from when_it_pays import HELD_OUT_SEED, PILOT, Arm, Run, Task

import trl_replay

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
"""One of them is run, as the plan says."""
TASKS = {"french": study.TASKS["french"], "products": study.TASKS["products"], **LISTS}
PRESET: dict[str, Any] = {"replay_preset": "sample_efficient"}
CORRECTIONS = ("ratio", "m2po", "asymre", "oapl")
ARMS = {
    **{arm: study.ARMS[arm] for arm in ("stock", "stock, 2 updates", "sample_efficient")},
    "preset, 4 updates": Arm(PRESET, iterations=4, beta=0.1),
    "stock, 4 updates": Arm(None, iterations=4),
    "anchor, 2 updates": Arm({"replay_buffer_size": 0, "replay_kl": "all_wrong"}, iterations=2, beta=0.1),
    "preset, 4 updates, 4 uses": Arm({**PRESET, "replay_max_uses": 4}, iterations=4, beta=0.1),
    "preset, 4 updates, 12 uses": Arm({**PRESET, "replay_max_uses": 12}, iterations=4, beta=0.1),
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
    Stage(arm, task, rates)
    for arm in (*(f"preset, {name}" for name in CORRECTIONS), "preset, no anchor", "preset, 1 update")
    for task, rates in FIRST.items()
]
CURVE = {"french": (8e-5, 4e-5, 2e-5, 1e-5, 5e-6), "products": (3e-5, 1e-5, 3e-6, 1e-6)}
CURVE_ARMS = ("stock", "sample_efficient", "stock, KL 0.02", "stock, 2 updates", "stock, KL 0.1")
SEEDS = (0, 1, 2)


def exists(arm: Arm) -> bool:
    """Whether this release of trl_replay has the arm's correction."""
    try:
        trl_replay.ReplayConfig(**(arm.settings or {}))
    except trl_replay.UnknownNameError:
        return False
    return True


def finished(*paths: Path) -> dict[Run, list[dict[str, Any]]]:
    """The runs that are whole, in the study's ledger, in this one's, and there; of french, products, and the list."""
    there = study.ledger(study.RESULTS, RESULTS, *paths)
    known = {run: lines for run, lines in there.items() if run.task in TASKS and run.arm in ARMS}
    return {run: lines for run, lines in known.items() if study.is_whole(TASKS[run.task], lines[-1])}


def piloted_rate(done: dict[Run, list[dict[str, Any]]], stage: Stage) -> float | None:
    """The rate of the better pilot, of equal ones the lower; None before all are whole."""
    pilots = [Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates]
    if not pilots or not done.keys() >= set(pilots):
        return None
    return max(pilots, key=lambda run: (done[run][-1]["sampled"], -run.rate)).rate


def runs_of(done: dict[Run, list[dict[str, Any]]], stage: Stage) -> Iterator[Run]:
    """Those that can be said by now: the pilots, and the seeds when the rate is known."""
    yield from (Run(stage.task, stage.arm, rate, PILOT) for rate in stage.rates)
    of = next((other for other in STAGES if (other.arm, other.task) == (stage.rate_of, stage.task)), stage)
    rate = piloted_rate(done, of)
    if rate is not None:
        yield from (Run(stage.task, stage.arm, rate, seed) for seed in SEEDS)


def queue(done: dict[Run, list[dict[str, Any]]]) -> Iterator[Run]:
    """All runs of the plan that can be said by now, in its order."""
    for stage in STAGES:
        yield from runs_of(done, stage)
    for task, rates in CURVE.items():
        yield from (Run(task, arm, rate, seed) for rate, arm, seed in itertools.product(rates, CURVE_ARMS, SEEDS))
    for stage in LATER_STAGES:
        if exists(ARMS[stage.arm]):
            yield from runs_of(done, stage)


def left(path: Path) -> list[Run]:
    """The runs of the queue that are not whole."""
    done = finished(path)
    return [run for run in queue(done) if run not in done]


def work(path: Path) -> None:
    """Trains what is left, one run after the other, until other processes have the rest."""

    def perform_one() -> bool:
        for run in left(path):
            with study.claimed(run, path.parent) as is_mine:
                if is_mine and run not in finished(path):
                    study.perform(run, TASKS[run.task], ARMS[run.arm], path)
                    print(f"{run.name}: done", flush=True)
                    return True
        return False

    while perform_one():
        pass


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screen", action="store_true", help="only measure the lists before training")
    parser.add_argument("--left", action="store_true", help="only print which runs are left")
    parser.add_argument(
        "--out", type=Path, default=Path("out/updates_per_batch"), help="folder of model, claims, and ledger"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "updates_per_batch.jsonl"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    if options.screen:
        study.screen(options.out, LISTS)
    elif options.left:
        print("\n".join(run.name for run in left(path)))
    else:
        os.nice(19)
        work(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
