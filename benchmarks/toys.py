"""Runs on toy tasks that end when their completions are generated, in a ledger; and the choice of learning rates.

Every arm has a learning rate of its own on each task, chosen by final reward on seeds that are not reported. Records
are appended to runs.jsonl in --out, so that an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import addition
import alone  # noqa: F401
import lock
import numpy as np
import torch
import vaults
from transformers import PrinterCallback, TrainerCallback

from trl_replay import attached, reporting

COMPLETIONS_A_BATCH = 64
FINAL = 0.1
"""The share of a run's completions, its last ones, over which the final reward is taken."""
WINDOW = 3200
"""Completions over which a run's mean reward must be 0.25 to count as having got there."""
BATCHES_A_POINT = 25
"""Of a run's curve."""
Settings = dict[str, Any] | None  # of ReplayConfig; None is stock
Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Settings of one task. `selection_seeds` choose the learning rate and are not reported."""

    budget: int  # completions of each run
    rates: tuple[float, ...]
    selection_seeds: tuple[int, ...] = ()
    rates_from: str = ""  # a task whose choice of rates holds here, too


@dataclass(frozen=True)
class Job:
    """One training run. `training` are settings of `GRPOConfig`."""

    task: str
    arm: str
    learning_rate: float
    seed: int
    budget: int
    settings: Settings
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The identity of a run, of which an arm's name is no part."""
        same = [self.task, self.settings, self.learning_rate, self.seed, self.budget, self.training]
        return json.dumps(same, sort_keys=True)


def formatted(completions: list[str], **_: Any) -> list[float]:
    """1 for two letters."""
    return [float(len(text) == 2 and text.isalpha()) for text in completions]


def length(completions: list[str], **_: Any) -> list[float]:
    """Up to 0.1 for a short text: letters later in the alphabet are longer."""
    return [0.1 - sum(map("abcdefghijklmnop".find, text)) / 300 for text in completions]


def make_trainer(job: Job, folder: str) -> Any:
    """The task's trainer, with more updates than the completions can last for."""
    steps = (job.budget // COMPLETIONS_A_BATCH + 1) * job.training.get("num_iterations", 1)
    given = job.seed, job.learning_rate, steps, folder
    if job.task in vaults.VAULTS:
        return vaults.make_trainer(vaults.VAULTS[job.task], *given, **job.training)
    if job.task in ("addition", "digits"):
        reward = vaults.share_of_letters if job.task == "digits" else lock.reward
        return addition.make_trainer(*given, reward, **job.training)
    rewards = [formatted, lock.reward, length] if job.task == "sum" else lock.reward
    return lock.make_trainer(*given, rewards, **job.training)


class Watch(TrainerCallback):
    """Copies each step's log, and stops when the completions are generated. What is generated again counts."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.reward: list[float] = []
        self.dead: list[float] = []
        self.dead_after: list[float] = []
        self.rollouts: list[int] = []
        self.tokens = 0
        self.metrics: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        """Copy the log of a step."""
        if "reward" not in logs:
            return  # the summary at the end of training
        self.reward.append(logs.get("rewards/reward/mean", logs["reward"]))  # of the lock's own, not of a sum
        self.dead.append(logs["frac_reward_zero_std"])
        self.dead_after.append(logs.get("replay/dead_fraction_after", self.dead[-1]))
        generated = COMPLETIONS_A_BATCH * len(self.reward)
        self.rollouts.append(int(logs.get("replay/rollouts", generated)))
        self.tokens = int(logs["num_tokens"])
        for key, value in logs.items():
            if key.startswith("replay/"):
                self.metrics.setdefault(key, []).append(value)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        control.should_training_stop |= bool(self.rollouts) and self.rollouts[-1] >= self.budget


def perform(job: Job) -> Record:
    """Runs one job in this process, with all metrics in its log; returns its record."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    watch, settings = Watch(job.budget), {"use_replay": False} if job.settings is None else job.settings
    all_metrics = mock.patch.object(reporting, "is_logged", return_value=True)
    with tempfile.TemporaryDirectory() as folder, all_metrics, redirect_stdout(StringIO()):
        trainer = make_trainer(job, folder)
        if file := settings.get("replay_warm_start"):
            teach(trainer.train_dataset, Path(file))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(watch)
        started = time.perf_counter()
        with attached(trainer, **settings):
            trainer.train()
    late = -len(watch.dead) // 4
    result = {
        **asdict(job),
        "final_reward": over_last(watch.reward, watch.rollouts, FINAL * watch.rollouts[-1]),
        "reached": reached(watch.reward, watch.rollouts),
        "rollouts": watch.rollouts[-1],
        "tokens": watch.tokens,
        "updates": len(watch.reward) * job.training.get("num_iterations", 1),
        "seconds": round(time.perf_counter() - started, 1),
        "dead": float(np.mean(watch.dead)),
        "dead_after": float(np.mean(watch.dead_after)),
        "last_quarter": {"dead": float(np.mean(watch.dead[late:])), "reward": float(np.mean(watch.reward[late:]))},
        "curve": [
            round(float(np.mean(watch.reward[at : at + BATCHES_A_POINT])), 4)
            for at in range(0, len(watch.reward), BATCHES_A_POINT)
        ],
        "replay": {key: round(float(np.mean(values)), 5) for key, values in watch.metrics.items()},
    }
    return result | ({"accuracy": addition.accuracy(trainer.model)} if job.task == "addition" else {})


def teach(rows: Iterable[Mapping[str, str]], path: Path) -> None:
    """Writes the right answers to the first 4,096 prompts."""
    prompts = {row["prompt"]: row for row in rows}
    lines = [json.dumps({**row, "completion": row["answer"], "reward": 1.0}) for row in prompts.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines[:4096]))


def over_last(rewards: list[float], rollouts_at: list[int], count: float) -> float:
    """The mean reward of the last `count` completions."""
    sizes = np.diff([0, *rollouts_at])
    late = np.asarray(rollouts_at) > rollouts_at[-1] - count
    return float(np.average(np.asarray(rewards)[late], weights=sizes[late]))


def reached(rewards: list[float], rollouts_at: list[int], threshold: float = 0.25) -> int | None:
    """Completions generated when the last `WINDOW` of them first had a mean reward of `threshold`; None if never."""
    sizes = np.diff([0, *rollouts_at])
    total = np.concatenate([[0.0], np.cumsum(np.asarray(rewards) * sizes)])
    ends = np.asarray(rollouts_at)
    for step, end in enumerate(ends.tolist()):
        begin = int(np.searchsorted(ends, end - WINDOW, side="right"))
        if end >= WINDOW and (total[step + 1] - total[begin]) / (end - (ends[begin - 1] if begin else 0)) >= threshold:
            return int(end)
    return None


class Ledger:
    """The records of all runs so far, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._pool: ProcessPoolExecutor | None = None
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line)
            self.records[record.pop("key")] = record

    def run(self, jobs: Sequence[Job], processes: int) -> list[Record]:
        """The jobs' records, in their order; those that are not there yet are run."""
        todo = {job.key: job for job in jobs if job.key not in self.records}
        if todo:
            # one process a run at a time, each with one torch thread; they keep what they imported and taught
            context = multiprocessing.get_context("spawn")
            self._pool = self._pool or ProcessPoolExecutor(processes, mp_context=context)
            running = {self._pool.submit(perform, job): key for key, job in todo.items()}
            try:
                for future in as_completed(running):
                    self._add(running[future], future.result())
            finally:
                for future in running:
                    future.cancel()  # those that have not begun, where one failed
        return [{**self.records[job.key], "arm": job.arm} for job in jobs]

    def _add(self, key: str, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, **record}) + "\n")
        self.records[key] = record
        names = ("task", "arm", "learning_rate", "seed", "final_reward", "reached", "seconds")
        print(time.strftime("%H:%M:%S"), *(f"{name} {record[name]}" for name in names), flush=True)


class Benchmark:
    """Runs arms, and remembers which learning rate each chose on each task.

    Args:
        tasks (`dict[str, Task]`): By name.
        seeds (`Sequence[int]`): Those that are reported.
        arms (`Callable`): Of an arm, a task, and a seed, the settings of replay and of the trainer.
        options (`Namespace`): What `parser_of` read.
    """

    def __init__(
        self,
        tasks: dict[str, Task],
        seeds: Sequence[int],
        arms: Callable[[str, str, int], tuple[Settings, dict[str, Any]]],
        options: argparse.Namespace,
    ) -> None:
        quick = {name: Task(640, task.rates[:1], (100,), task.rates_from) for name, task in tasks.items()}
        self.tasks = quick if options.quick else tasks
        self.seeds = seeds[:1] if options.quick else seeds
        self.arms, self.processes = arms, options.jobs
        options.out.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(options.out / "runs.jsonl")
        self.chosen: dict[str, dict[str, float]] = {}

    def jobs(self, task: str, arm: str, rate: float, seeds: Iterable[int]) -> list[Job]:
        """One for each seed."""
        budget = self.tasks[task].budget
        return [Job(task, arm, rate, seed, budget, *self.arms(arm, task, seed)) for seed in seeds]

    def run(self, jobs: Sequence[Job]) -> list[Record]:
        """Their records, in their order."""
        return self.ledger.run(jobs, self.processes)

    def choose(self, task: str, arm: str) -> float:
        """The arm's best learning rate by final reward on seeds that are not reported."""
        rule = self.tasks[task]
        if rule.rates_from:
            return self.choose(rule.rates_from, arm)
        known = self.chosen.setdefault(arm, {})
        if task not in known:
            rewards: dict[float, list[float]] = {rate: [] for rate in rule.rates}
            trials = itertools.chain(*(self.jobs(task, arm, rate, rule.selection_seeds) for rate in rule.rates))
            for record in self.run(list(trials)):
                rewards[record["learning_rate"]].append(record["final_reward"])
            known[task] = max(rewards, key=lambda rate: (float(np.mean(rewards[rate])), -rate))
        return known[task]

    def at_chosen_rates(
        self, arms: Iterable[str], chosen_by: str = "", tasks: Iterable[str] = (), seeds: Sequence[int] = ()
    ) -> list[Record]:
        """Each arm on each task and seed, at its own rate or at that of another arm."""
        records, seeds = [], (seeds or self.seeds)[: len(self.seeds)]
        for arm, task in itertools.product(arms, tasks or self.tasks):
            records += self.run(self.jobs(task, arm, self.choose(task, chosen_by or arm), seeds))
        return records


def parser_of(description: str | None, name: str, questions: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The options of a benchmark that keeps a ledger."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out") / name, help="folder of runs.jsonl and results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process with one thread")
    parser.add_argument("--quick", action="store_true", help="a few steps only: its figures mean nothing")
    if questions:
        parser.add_argument("--questions", nargs="+", choices=[*questions], default=[*questions], help="which ones")
    return parser
