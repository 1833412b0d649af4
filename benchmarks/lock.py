"""Runs on the combination lock of `trl-replay demo`, and on other toy tasks, recorded step by step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any
from unittest import mock

import numpy as np
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from trl_replay import attached, demo, reporting
from trl_replay.demo import GENERATIONS, HIDDEN_SIZE, LETTERS, codes, reward, taught
from trl_replay.testing import make_tokenizer

__all__ = ["GENERATIONS", "HIDDEN_SIZE", "LETTERS", "codes", "reward", "taught"]
THRESHOLD = 0.25
WINDOW = 50
EVERY = 3.0
"""Seconds between two lines of progress."""


@dataclass(slots=True)
class Record:
    """One training run, step by step.

    Attributes:
        arm (`str`): Its name in tables.
        seed (`int`): The trainer's seed.
        learning_rate (`float`): Constant over the run.
        settings (`dict`, *optional*): Of [`ReplayConfig`]; None is stock.
        reward (`list[float]`): Mean reward of each step's generated completions, replayed ones not counted.
        dead (`list[float]`): Share of dead groups among the generated ones.
        dead_after (`list[float]`): Share of dead groups among those trained on.
        means (`dict[str, float]`): Mean of each `replay/*` metric over the steps that have it.
        rollouts (`int`): Completions generated.
        rollouts_at (`list[int]`): The same at the end of each step.
        tokens (`int`): Tokens of prompts and completions generated.
        seconds (`float`): Of `trainer.train()`.
        explanation (`str`): `session.explain()`; empty for stock.
    """

    arm: str
    seed: int
    learning_rate: float
    settings: dict[str, Any] | None
    reward: list[float] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)
    dead_after: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    rollouts: int = 0
    rollouts_at: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    explanation: str = ""

    def final(self, steps: int) -> float:
        """Mean reward of the last `steps` steps."""
        return float(np.mean(self.reward[-steps:]))

    def reached(self, threshold: float = THRESHOLD, window: int = WINDOW) -> int | None:
        """Completions generated up to the end of the first `window` steps in a row whose mean reward is at least
        `threshold`; None if there are none."""
        if len(self.reward) < window:
            return None
        means = np.convolve(self.reward, np.full(window, 1 / window), mode="valid")
        hits = np.flatnonzero(means >= threshold - 1e-9)
        return self.rollouts_at[int(hits[0]) + window - 1] if len(hits) else None

    def curve(self, window: int = WINDOW) -> list[float]:
        """Mean reward of each `window` steps, one after the other."""
        return [float(np.mean(self.reward[at : at + window])) for at in range(0, len(self.reward), window)]


def toy_trainer(model: Any, rows: list[dict[str, str]], output_dir: str, *given: Any, **settings: Any) -> Any:
    """The demo's trainer on another task; with `beta`, the model is saved where the trainer finds its reference."""
    if settings.get("beta"):
        model.save_pretrained(f"{output_dir}/reference")
        make_tokenizer().save_pretrained(f"{output_dir}/reference")
        model = AutoModelForCausalLM.from_pretrained(f"{output_dir}/reference")
    return demo.toy_trainer(model, rows, output_dir, *given, **settings)


def make_trainer(seed: int, learning_rate: float, steps: int, output_dir: str, **settings: Any) -> Any:
    """The demo's trainer on the lock."""
    model = demo.make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()]
    plain = {"seed": seed, "learning_rate": learning_rate, "max_steps": steps, "max_completion_length": 3}
    return toy_trainer(model, rows * 2000, output_dir, **{**plain, **settings})


class Watch(TrainerCallback):
    """Copies each step's log into a record, which is shown every few seconds."""

    def __init__(self, record: Record, show: Callable[[Record], None] | None) -> None:
        self.record = record
        self.show = show
        self.shown = time.monotonic()
        self.metrics: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        """Copy the log of a step."""
        if "reward" not in logs:
            return  # the summary at the end of training
        record = self.record
        dead = logs["frac_reward_zero_std"]
        record.reward.append(logs.get("rewards/reward/mean", logs["reward"]))  # of the function above, not of a sum
        record.dead.append(dead)
        record.dead_after.append(logs.get("replay/dead_fraction_after", dead))
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        record.rollouts = int(logs.get("replay/rollouts", record.rollouts + rows))  # what is generated again counts
        record.rollouts_at.append(record.rollouts)
        record.tokens = int(logs["num_tokens"])
        for key, value in logs.items():
            if key.startswith("replay/"):
                self.metrics.setdefault(key, []).append(value)
        if self.show and time.monotonic() - self.shown >= EVERY:
            self.shown = time.monotonic()
            self.show(record)


def train(trainer: Any, record: Record, show: Callable[[Record], None] | None = None) -> Record:
    """Trains with `record.settings`, fills in the record and returns it. The log has all metrics.

    Args:
        trainer (`trl.GRPOTrainer`): With `logging_steps=1` and one generation batch an update.
        record ([`Record`]): Arm, seed, learning rate and settings.
        show (`Callable`, *optional*): Gets the record so far every few seconds.
    """
    watch = Watch(record, show)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    settings = {"use_replay": False} if record.settings is None else record.settings
    started = time.perf_counter()
    all_metrics = mock.patch.object(reporting, "is_logged", return_value=True)
    with all_metrics, attached(trainer, **settings) as session, redirect_stdout(StringIO()):
        trainer.train()
    record.seconds = time.perf_counter() - started
    record.means = {key: float(np.mean(values)) for key, values in watch.metrics.items()}
    record.explanation = session.explain() if session.enabled else ""
    return record


def run(
    arm: str,
    seed: int,
    learning_rate: float,
    steps: int,
    settings: dict[str, Any] | None = None,
    show: Callable[[Record], None] | None = None,
    **training: Any,
) -> Record:
    """Trains on the lock; the arguments are [`Record`]'s, `steps` generation batches of 64 completions, and settings
    of `GRPOConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        updates = steps * training.get("num_iterations", 1)
        trainer = make_trainer(seed, learning_rate, updates, folder, **training)
        return train(trainer, Record(arm, seed, learning_rate, settings), show)
