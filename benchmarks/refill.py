"""Compares generating again for dead groups with filling their slots from a buffer, and both together.

    python benchmarks/refill.py                    # all of it: about 50 minutes on one core
    python benchmarks/refill.py --quick            # shows that it runs; its figures mean nothing
    python benchmarks/refill.py --arms "stock,buffer only" --tasks lock

Every run of a task ends when it has generated the same number of completions: an arm that generates again makes fewer
updates of them. Tasks: the combination lock (8 prompts), a lock with 1,000 keys (both 3 % live at first), and addition
(dense). For each arm one learning rate is chosen on the lock from a grid by final reward, averaged over two seeds that
are not reported, as in learning.py, and holds on the wide lock too; addition has the one that learning.py chose.
Records are appended to runs.jsonl in --out, so that an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from learning import Ledger, Settings

if TYPE_CHECKING:
    from lock import Record

NO_BUFFER = {"replay_buffer_size": 0}
ARMS: dict[str, Settings] = {
    "stock": None,
    "filter only": {**NO_BUFFER, "replay_unfilled": "exclude"},
    "refill until full": {**NO_BUFFER, "replay_refill": "new(rounds=10)"},  # DAPO's dynamic sampling
    "buffer only": {},
    "refill once and buffer": {"replay_refill": "new(rounds=1)"},
}
FINAL = 0.1
"""The share of a run's completions, its last ones, over which the final reward is taken."""
WINDOW = 3200
"""Completions over which a run's mean reward must be 0.25 to count as having got there."""


@dataclass(frozen=True)
class Protocol:
    """Settings of one task. `selection_seeds` choose the learning rate and are not reported."""

    budget: int  # completions of each run
    grid: tuple[float, ...]
    selection_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2)


SPARSE_GRID = (2e-4, 3e-4, 5e-4, 1e-3)
PROTOCOLS = {
    "lock": Protocol(64_000, SPARSE_GRID),
    "wide lock": Protocol(48_000, ()),  # at the rates that the lock chose
    "addition": Protocol(16_000, (1e-4,)),  # which learning.py chose for stock and for replay
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    task: str
    arm: str
    learning_rate: float
    seed: int
    budget: int
    settings: Settings

    @property
    def key(self) -> str:
        """The identity of a run, of which an arm's name is no part."""
        return json.dumps([self.task, self.settings, self.learning_rate, self.seed, self.budget], sort_keys=True)


def make_trainer(job: Job, folder: str) -> Any:
    """The task's trainer, with more updates than the completions can last for."""
    steps = job.budget // 64 + 1
    if job.task == "addition":
        import addition

        return addition.make_trainer(job.seed, job.learning_rate, steps, folder)
    if job.task == "wide lock":
        import vaults

        return vaults.make_trainer(vaults.WIDE_LOCK, job.seed, job.learning_rate, steps, folder)
    import lock

    return lock.make_trainer(job.seed, job.learning_rate, steps, folder)


def perform(job: Job) -> dict[str, Any]:
    """Runs one job in this process and returns its record."""
    return trained(job, make_trainer)[0]


def trained(job: Any, make_trainer: Callable[[Any, str], Any]) -> tuple[dict[str, Any], Record]:
    """Trains until a job's completions are generated; returns what is kept of the run, and all that it showed."""
    import torch
    from lock import Record, train
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    record = Record(job.arm, job.seed, job.learning_rate, job.settings)

    class StopAtBudget(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= record.rollouts >= job.budget

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder)
        trainer.add_callback(StopAtBudget())
        train(trainer, record)
    result = {
        **asdict(job),
        "final_reward": over_last(record.reward, record.rollouts_at, FINAL * record.rollouts),
        "reached": reached(record.reward, record.rollouts_at),
        "rollouts": record.rollouts,
        "tokens": record.tokens,
        "updates": len(record.reward),
        "seconds": round(record.seconds, 1),
        "dead": float(np.mean(record.dead)),
        "dead_after": float(np.mean(record.dead_after)),
        "last_quarter": {
            "dead": float(np.mean(record.dead[-len(record.dead) // 4 :])),
            "reward": float(np.mean(record.reward[-len(record.reward) // 4 :])),
        },
    }
    if job.task == "addition":
        import addition

        result["accuracy"] = addition.accuracy(trainer.model)
    return result, record


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


def run_task(
    task: str,
    protocol: Protocol,
    arms: dict[str, Settings],
    ledger: Ledger,
    jobs: int,
    rates_of_lock: dict[str, float],
) -> dict[str, Any]:
    """Chooses each arm's learning rate, if there are several, then runs the reported seeds."""

    def of(arm: str, rate: float, seeds: tuple[int, ...]) -> list[Job]:
        return [Job(task, arm, rate, seed, protocol.budget, arms[arm]) for seed in seeds]

    chosen: dict[str, float] = {}
    for arm in arms:
        if len(protocol.grid) < 2:
            chosen[arm] = protocol.grid[0] if protocol.grid else rates_of_lock[arm]
            continue
        trials = ledger.run([job for rate in protocol.grid for job in of(arm, rate, protocol.selection_seeds)], jobs)
        rewards = {
            rate: [run["final_reward"] for run in trials if run["learning_rate"] == rate] for rate in protocol.grid
        }
        chosen[arm] = max(rewards, key=lambda rate: (float(np.mean(rewards[rate])), -rate))
    reported = [job for arm in arms for job in of(arm, chosen[arm], protocol.seeds)]
    runs = ledger.run(reported, jobs)
    return {"protocol": asdict(protocol), "chosen": chosen, "runs": runs}


def table(task: str, result: dict[str, Any], arms: dict[str, Settings]) -> list[str]:
    """The task's rows, in Markdown."""
    budget = result["protocol"]["budget"]
    lines = [
        f"{task}, {budget:,} completions a run, medians of {len(result['protocol']['seeds'])} seeds (range):",
        "",
        "| | rate | updates | completions to 0.25 | final reward | accuracy | dead: generated → trained on |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        runs = [run for run in result["runs"] if run["arm"] == arm]
        finals = [run["final_reward"] for run in runs]
        there = [run["reached"] for run in runs if run["reached"]]
        median = np.median([run["reached"] or budget for run in runs])
        right = f"{np.mean([run['accuracy'] for run in runs]):.3f}" if "accuracy" in runs[0] else "–"
        cells = [
            arm,
            f"{result['chosen'][arm]:.0e}",
            f"{np.median([run['updates'] for run in runs]):.0f}",
            f"{median:,.0f} ({len(there)} of {len(runs)})",
            f"{np.median(finals):.2f} ({min(finals):.2f}–{max(finals):.2f})",
            right,
            f"{np.mean([run['dead'] for run in runs]):.0%} → {np.mean([run['dead_after'] for run in runs]):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/refill"), help="folder of runs.jsonl and results")
    parser.add_argument("--tasks", default=",".join(PROTOCOLS), help="which tasks, separated by commas")
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms, by commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process with one thread")
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that it runs")
    options = parser.parse_args(arguments)
    arms = {name: ARMS[name] for name in options.arms.split(",")}
    protocols = {task: PROTOCOLS[task] for task in options.tasks.split(",")}
    if options.quick:
        few = {"budget": 2_000, "selection_seeds": (100,), "seeds": (0, 1)}
        protocols = {task: replace(protocol, **few, grid=(3e-4,)) for task, protocol in protocols.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.out / "runs.jsonl", perform)
    results = {}
    rates_of_lock: dict[str, float] = dict.fromkeys(arms, 3e-4)
    for task, protocol in protocols.items():
        results[task] = run_task(task, protocol, arms, ledger, options.jobs, rates_of_lock)
        if task == "lock":
            rates_of_lock = results[task]["chosen"]
        print("\n".join(table(task, results[task], arms)), flush=True)
    content = {"quick": options.quick, "arms": arms, "tasks": results}
    (options.out / "refill.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
