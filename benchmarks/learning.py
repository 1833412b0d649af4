"""Does replay learn more from the same number of completions, and does it do no harm where stock learns well?

    python benchmarks/learning.py                    # all of it: about 45 minutes on one core
    python benchmarks/learning.py --quick            # shows that it runs; its figures mean nothing
    python benchmarks/learning.py --arm fresh=max_age:3,evictor:fifo --jobs 2

Tasks: the combination lock (sparse) and 3-digit addition from a half-trained model (dense control). Arms: stock,
corrected (the defaults of ReplayConfig), uncorrected (replay_correction="none"), with the same settings on both tasks.
For each arm and task one learning rate is chosen from the task's grid by final reward, averaged over seeds that are
not reported. Every run's record is appended to runs.jsonl in --out, so that an interrupted benchmark goes on where it
stopped; another --out starts afresh.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

Settings = dict[str, Any] | None  # of ReplayConfig; None is stock
ARMS: dict[str, Settings] = {"stock": None, "corrected": {}, "uncorrected": {"replay_correction": "none"}}


@dataclass(frozen=True)
class Protocol:
    """Settings of one task. `selection_seeds` choose the learning rate and are not reported."""

    task: str
    steps: int
    final: int  # the last steps whose mean reward is the final reward
    grid: tuple[float, ...]
    selection_seeds: tuple[int, ...]
    seeds: tuple[int, ...] = tuple(range(5))


PROTOCOLS = {
    "lock": Protocol("lock", 1500, 150, (2e-4, 3e-4, 5e-4, 1e-3), (100, 101)),
    "addition": Protocol("addition", 500, 50, (1e-5, 3e-5, 1e-4), (100, 101)),
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    task: str
    arm: str
    learning_rate: float
    seed: int
    steps: int
    final: int
    settings: Settings

    @property
    def key(self) -> str:
        """The identity of a run, of which an arm's name is no part."""
        return json.dumps([self.task, self.settings, self.learning_rate, self.seed, self.steps], sort_keys=True)


def perform(job: Job) -> dict[str, Any]:
    """Runs one job in this process and returns its record."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    if job.task == "lock":
        import lock

        record = lock.run(job.arm, job.seed, job.learning_rate, job.steps, job.settings)
        extra: dict[str, Any] = {}
    else:
        import addition

        record, accuracy = addition.run(job.arm, job.seed, job.learning_rate, job.steps, job.settings)
        extra = {"start_accuracy": addition.start_accuracy(), "accuracy": accuracy}
    rounded = {key: round(value, 5) for key, value in record.means.items()}
    return {
        **asdict(job),
        "final_reward": record.final(job.final),
        "reached": record.reached(),
        "reached_three_quarters": record.reached(0.75),
        "rollouts": record.rollouts,
        "seconds": round(record.seconds, 1),
        "dead": sum(record.dead) / len(record.dead),
        "dead_after": sum(record.dead_after) / len(record.dead_after),
        **extra,
        "curve": [round(value, 4) for value in record.curve()],
        "replay": rounded,
        "explanation": record.explanation,
    }


class Ledger:
    """The records of all runs so far, in a file that only grows."""

    def __init__(self, path: Path, perform: Callable[[Any], dict[str, Any]] = perform) -> None:
        self.path = path
        self.perform = perform
        self.records: dict[str, dict[str, Any]] = {}
        self._pool: ProcessPoolExecutor | None = None
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            record = json.loads(line)
            self.records[record.pop("key")] = record

    def run(self, jobs: Iterable[Any], processes: int) -> list[dict[str, Any]]:
        """The jobs' records, in their order; those that are not there yet are run."""
        jobs = list(jobs)
        todo = {job.key: job for job in jobs if job.key not in self.records}
        if todo:
            # one process a run at a time, each with one torch thread; they keep what they imported and taught
            context = multiprocessing.get_context("spawn")
            self._pool = self._pool or ProcessPoolExecutor(processes, mp_context=context)
            running = {self._pool.submit(self.perform, job): key for key, job in todo.items()}
            try:
                for future in as_completed(running):
                    self._add(running[future], future.result())
            finally:
                for future in running:
                    future.cancel()  # those that have not begun, where one failed
        return [{**self.records[job.key], "arm": job.arm} for job in jobs]

    def _add(self, key: str, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, **record}) + "\n")
        self.records[key] = record
        result = f"accuracy {record['accuracy']:.3f}" if "accuracy" in record else f"reached {record['reached']}"
        print(
            f"{time.strftime('%H:%M:%S')} {record['task']:8} {record['arm']:12} lr {record['learning_rate']:.0e} "
            f"seed {record['seed']:3}  final reward {record['final_reward']:.3f}  {result}  {record['seconds']} s",
            flush=True,
        )


def run_task(protocol: Protocol, arms: dict[str, Settings], ledger: Ledger, processes: int) -> dict[str, Any]:
    """Chooses each arm's learning rate, then runs the reported seeds."""

    def jobs(arm: str, rate: float, seeds: tuple[int, ...]) -> list[Job]:
        return [Job(protocol.task, arm, rate, seed, protocol.steps, protocol.final, arms[arm]) for seed in seeds]

    trials = [job for arm in arms for rate in protocol.grid for job in jobs(arm, rate, protocol.selection_seeds)]
    selection: dict[str, dict[float, float]] = {arm: dict.fromkeys(protocol.grid, 0.0) for arm in arms}
    for record in ledger.run(trials, processes):
        share = record["final_reward"] / len(protocol.selection_seeds)
        selection[record["arm"]][record["learning_rate"]] += share
    chosen = {arm: max(rates, key=lambda rate: (rates[rate], -rate)) for arm, rates in selection.items()}
    reported = [job for arm in arms for job in jobs(arm, chosen[arm], protocol.seeds)]
    return {
        "protocol": asdict(protocol),
        "selection": {arm: {f"{rate:.0e}": mean for rate, mean in rates.items()} for arm, rates in selection.items()},
        "chosen": chosen,
        "runs": ledger.run(reported, processes),
    }


def parse_arm(text: str) -> tuple[str, dict[str, Any]]:
    """`name=setting:value,…` as a name and settings of ReplayConfig; `replay_` may be left out, values are JSON or
    text."""
    from trl_replay import ReplayConfig

    name, _, rest = text.partition("=")
    settings: dict[str, Any] = {}
    for part in re.split(r",(?=\w+:)", rest) if rest else []:
        setting, _, value = part.partition(":")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        settings[setting if setting.startswith("replay_") else f"replay_{setting}"] = parsed
    ReplayConfig().with_settings(settings, f"--arm {name}")
    return name, settings


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/learning"), help="folder of runs.jsonl and results")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=SETTING:VALUE,...", help="one arm more")
    parser.add_argument("--tasks", default="lock,addition", help="which tasks, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process with one thread")
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that it runs")
    options = parser.parse_args(arguments)
    arms = ARMS | dict(parse_arm(text) for text in options.arm)
    protocols = [PROTOCOLS[task] for task in options.tasks.split(",")]
    if options.quick:
        few = {"steps": 60, "final": 10, "selection_seeds": (100,), "seeds": (0, 1)}
        protocols = [replace(protocol, **few, grid=protocol.grid[1:2]) for protocol in protocols]
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.out / "runs.jsonl")
    tasks = {}
    for protocol in protocols:
        tasks[protocol.task] = run_task(protocol, arms, ledger, options.jobs)

    from learning_report import summarize

    summarize(tasks, arms, options.out, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
