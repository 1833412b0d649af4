"""Runs that end when their completions are generated: those that generate again make fewer updates."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from learning import Settings

if TYPE_CHECKING:
    from lock import Record

FINAL = 0.1
"""The share of a run's completions, its last ones, over which the final reward is taken."""
WINDOW = 3200
"""Completions over which a run's mean reward must be 0.25 to count as having got there."""


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
