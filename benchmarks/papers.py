"""The methods of papers, what they give on four tasks, and what of it holds, for benchmarks/reports/papers.md.

    python benchmarks/papers.py                               # all of it: hours on one core
    python benchmarks/papers.py --questions methods,age       # some of it
    python benchmarks/papers.py --quick                       # shows that it runs; its figures mean nothing

Tasks: the combination lock (8 prompts), the vault (10,000 prompts, none of which comes twice), both with rewards of 0
and 1 and 3 % of the groups live at first; addition (a third live); and grades (1,000 prompts, rewards of 0, 1/3, 2/3
and 1, most groups live). Every run of a task ends when it has generated the same number of completions.

Questions:
    methods   POPO, its stale ablation, no correction, DAPO's refill, filtering, RL-ZVP and sign advantages beside
              stock and the defaults. For each, the learning rate is chosen from a grid by final reward on seeds that
              are not reported: on the lock for both sparse tasks, on each of the others for itself.
    presets   every other preset of trl-replay-papers, each at rates of its own, chosen likewise
    age       replay_max_age x learning rate x num_iterations, on the lock and on addition
    defaults  one setting of the defaults changed, at the rates of the defaults, on all four tasks

Records are appended to runs.jsonl in --out, so that an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import budget
from learning import Ledger, Settings

COMPLETIONS_A_BATCH = 64
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Task:
    """Settings of one task. `selection_seeds` choose the learning rate and are not reported."""

    budget: int  # completions of each run
    rates: tuple[float, ...]
    selection_seeds: tuple[int, ...] = ()
    rates_from: str = ""  # a task whose choice of rates holds here, too


TASKS = {
    "lock": Task(32_000, (3e-4, 5e-4, 1e-3), (100, 101)),
    "vault": Task(32_000, (), rates_from="lock"),
    "addition": Task(12_800, (3e-5, 1e-4), (100,)),
    "grades": Task(9_600, (3e-4, 1e-3), (100,)),
}
METHODS = {
    "stock": None,
    "defaults": "",
    "popo": "popo",
    "popo_stale": "popo_stale",
    "no correction": "",
    "dapo": "dapo",
    "filter": "filter",
    "rl_zvp": "rl_zvp",
    "sign_advantage": "sign_advantage",
}
"""Arms of the first and the third question, each with its preset."""
OTHER_PRESETS = (
    "adv_per",
    "fresh_per",
    "dots_rr",
    "m2po",
    "ragen2",
    "repo",
    "exgrpo",
    "arpo",
    "gfpo",
    "greso",
    "bapo",
    "fair_er",
    "rlep",
    "luffy",
)
TAUGHT = ("rlep", "luffy")
"""They replay rows of a file: here the right answers to the first 4,096 prompts."""
TRAINING: dict[str, dict[str, Any]] = {"fair_er": {"num_iterations": 2}}
"""Settings of `GRPOConfig` that an arm has besides."""
TEACHER = "out/papers/teacher {} {}.jsonl"
"""Of a task and a seed."""
AGES = (1, 3, 10, 30, None)
AGE_RATES = {"lock": (3e-4, 5e-4, 1e-3), "addition": (3e-5, 1e-4, 3e-4)}
ITERATIONS = (1, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "weight=0.5": {"replay_weight": 0.5},
    "max_fraction=0.5": {"replay_max_fraction": 0.5},
    "buffer_size=16": {"replay_buffer_size": 16},
    "buffer_size=256": {"replay_buffer_size": 256},
    "start=0": {"replay_start": 0},
}


@dataclass(frozen=True)
class Job(budget.Job):
    """One training run. `training` are settings of `GRPOConfig`."""

    training: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The identity of a run, of which an arm's name is no part."""
        same = [self.task, self.settings, self.learning_rate, self.seed, self.budget, self.training]
        return json.dumps(same, sort_keys=True)


def settings_of(arm: str) -> Settings:
    """An arm's settings, a preset's spelt out: a preset that changes makes other runs."""
    if arm == "stock":
        return None
    if arm == "defaults":
        return {}
    if arm == "no correction":
        return {"replay_correction": "none"}
    if arm in VARIANTS:
        return VARIANTS[arm]
    from trl_replay.registry import registry

    plugin, preset = registry().preset(arm)
    return {"replay_plugins": [plugin.name], **preset.settings}


def make_trainer(job: Job, folder: str) -> Any:
    """The task's trainer, and the file that the job replays, if any."""
    trainer = trainer_of_task(job, folder)
    taught = (job.settings or {}).get("replay_warm_start")
    if taught:
        prompts = {row["prompt"]: row for row in trainer.train_dataset}
        first = itertools.islice(prompts.values(), 4096)
        lines = [json.dumps({**row, "completion": row["answer"], "reward": 1.0}) for row in first]
        Path(taught).parent.mkdir(parents=True, exist_ok=True)
        Path(taught).write_text("\n".join(lines))
    return trainer


def trainer_of_task(job: Job, folder: str) -> Any:
    """The task's trainer, with more updates than the completions can last for."""
    steps = (job.budget // COMPLETIONS_A_BATCH + 1) * job.training.get("num_iterations", 1)
    if job.task == "lock":
        import lock

        return lock.make_trainer(job.seed, job.learning_rate, steps, folder, **job.training)
    if job.task == "addition":
        import addition

        return addition.make_trainer(job.seed, job.learning_rate, steps, folder, **job.training)
    import vaults

    vault = vaults.VAULT if job.task == "vault" else vaults.GRADES
    return vaults.make_trainer(vault, job.seed, job.learning_rate, steps, folder, **job.training)


def perform(job: Job) -> dict[str, Any]:
    """Runs one job in this process and returns its record."""
    result, record = budget.trained(job, make_trainer)
    result["replay"] = {name: round(value, 5) for name, value in record.means.items()}
    result["curve"] = [round(value, 4) for value in record.curve(25)]
    return result


class Benchmark:
    """Runs jobs, and remembers which learning rate each arm chose on each task."""

    def __init__(self, ledger: Ledger, processes: int, tasks: dict[str, Task], seeds: Sequence[int]) -> None:
        self.ledger = ledger
        self.processes = processes
        self.tasks = tasks
        self.seeds = seeds
        self.chosen: dict[str, dict[str, float]] = {}

    def jobs(self, task: str, arm: str, rate: float, seeds: Iterable[int], **training: Any) -> list[Job]:
        """One for each seed."""
        budget = self.tasks[task].budget
        besides = {**TRAINING.get(arm, {}), **training}
        return [Job(task, arm, rate, seed, budget, self.settings(arm, task, seed), besides) for seed in seeds]

    def settings(self, arm: str, task: str, seed: int) -> Settings:
        """An arm's settings, with the file of the task and seed where it replays one."""
        if arm not in TAUGHT:
            return settings_of(arm)
        of_file = {"replay_warm_start": TEACHER.format(task, seed), "replay_warm_start_short": "resample"}
        return {**(settings_of(arm) or {}), **of_file}

    def run(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        """Their records, in their order."""
        return self.ledger.run(jobs, self.processes)

    def choose(self, task: str, arm: str) -> float:
        """The arm's best learning rate by final reward on seeds that are not reported."""
        rule = self.tasks[task]
        if rule.rates_from:
            return self.choose(rule.rates_from, arm)
        known = self.chosen.setdefault(arm, {})
        if task not in known:
            trials = [job for rate in rule.rates for job in self.jobs(task, arm, rate, rule.selection_seeds)]
            rewards: dict[float, list[float]] = {rate: [] for rate in rule.rates}
            for record in self.run(trials):
                rewards[record["learning_rate"]].append(record["final_reward"])
            known[task] = max(rewards, key=lambda rate: (float(np.mean(rewards[rate])), -rate))
        return known[task]

    def at_chosen_rates(self, arms: Iterable[str], chosen_by: str = "") -> list[dict[str, Any]]:
        """Each arm on each task and seed, at its own rate or at that of another arm."""
        records = []
        for arm in arms:
            jobs = []
            for task in self.tasks:
                rate = self.choose(task, chosen_by or arm)
                jobs += self.jobs(task, arm, rate, self.seeds)
            records += self.run(jobs)
        return records


def methods(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Questions 1 and 3."""
    return benchmark.at_chosen_rates(METHODS)


def presets(benchmark: Benchmark) -> list[dict[str, Any]]:
    """The measurements that the method cards tell."""
    return benchmark.at_chosen_rates(OTHER_PRESETS)


def defaults(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Question 4."""
    return benchmark.at_chosen_rates(VARIANTS, chosen_by="defaults")


def age(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Question 2: one seed that nothing else reports."""
    jobs = []
    for task, rates in AGE_RATES.items():
        if task not in benchmark.tasks:
            continue
        budget = benchmark.tasks[task].budget
        for iterations in ITERATIONS:
            training = {} if iterations == 1 else {"num_iterations": iterations}
            for rate in rates:
                for most in AGES:
                    if most is not None and most < iterations:
                        continue  # it would be too old when it is first offered
                    settings = {} if most is None else {"replay_max_age": most}
                    jobs.append(Job(task, f"max_age={most}", rate, 100, budget, settings, training))
    return benchmark.run(jobs)


QUESTIONS: dict[str, Callable[[Benchmark], list[dict[str, Any]]]] = {
    "methods": methods,
    "age": age,
    "defaults": defaults,
    "presets": presets,
}


def tasks_of(names: str, tasks: dict[str, Task]) -> dict[str, Task]:
    """Those that are named, by commas, and those on which they choose their rates."""
    wanted = {name for task in names.split(",") for name in (task, tasks[task].rates_from)}
    return {name: task for name, task in tasks.items() if name in wanted}


def parser_of(description: str | None, out: str, tasks: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a benchmark that keeps a ledger."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of runs.jsonl and results")
    parser.add_argument("--tasks", default=",".join(tasks), help="which tasks, by commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process with one thread")
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that it runs")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = parser_of(__doc__, "out/papers", TASKS)
    parser.add_argument("--questions", default=",".join(QUESTIONS), help="which questions, by commas")
    options = parser.parse_args(arguments)
    tasks = tasks_of(options.tasks, TASKS)
    seeds = SEEDS
    if options.quick:
        tasks = {name: Task(640, task.rates[:1], (100,), task.rates_from) for name, task in tasks.items()}
        seeds = SEEDS[:1]
    options.out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(Ledger(options.out / "runs.jsonl", perform), options.jobs, tasks, seeds)
    answers = {question: QUESTIONS[question](benchmark) for question in options.questions.split(",")}

    from papers_report import summarize

    summarize(answers, benchmark.chosen, options.out, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
