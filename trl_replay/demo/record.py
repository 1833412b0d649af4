"""Trains a trainer with or without replay and keeps what each step showed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainerCallback

from ..trainer.attachment import attached

THRESHOLD = 0.25
WINDOW = 50


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

    def reached(
        self,
        threshold: float = THRESHOLD,
        window: int = WINDOW,
    ) -> int | None:
        """Completions generated up to the end of the first `window` steps in a row whose mean reward is at least
        `threshold`; None if there are none."""
        if len(self.reward) < window:
            return None
        weights = np.full(window, 1 / window)
        means = np.convolve(self.reward, weights, mode="valid")
        hits = np.flatnonzero(means >= threshold - 1e-9)
        if len(hits) == 0:
            return None
        last = int(hits[0]) + window - 1
        return self.rollouts_at[last]

    def curve(self, window: int = WINDOW) -> list[float]:
        """Mean reward of each `window` steps, one after the other."""
        means = []
        for start in range(0, len(self.reward), window):
            values = self.reward[start : start + window]
            means.append(float(np.mean(values)))
        return means

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Copies each step's log into a record and calls `on_window` every `window` steps."""

    def __init__(
        self,
        record: Record,
        on_window: Callable[[Record], None] | None,
        window: int,
    ) -> None:
        self.record = record
        self.on_window = on_window
        self.window = window
        self.metrics: dict[str, list[float]] = {}
        self.stdout = sys.stdout

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        """One step's values."""
        if "reward" not in logs:
            return  # the summary at the end of training
        record = self.record
        dead = logs["frac_reward_zero_std"]
        record.reward.append(logs["reward"])
        record.dead.append(dead)
        record.dead_after.append(logs.get("replay/dead_fraction_after", dead))
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        generated = record.rollouts + rows * args.world_size
        record.rollouts = int(logs.get("replay/rollouts", generated))  # what is generated again counts, too
        record.rollouts_at.append(record.rollouts)
        record.tokens = int(logs["num_tokens"])
        for key, value in logs.items():
            if key.startswith("replay/"):
                self.metrics.setdefault(key, []).append(value)
        if self.on_window and len(record.reward) % self.window == 0:
            with redirect_stdout(self.stdout):
                self.on_window(record)


def train(
    trainer: Any,
    record: Record,
    on_window: Callable[[Record], None] | None = None,
    window: int = WINDOW,
) -> Record:
    """Trains with `record.settings`, fills in the record and returns it.

    Args:
        trainer (`trl.GRPOTrainer`): With `logging_steps=1` and one generation batch an update.
        record ([`Record`]): Arm, seed, learning rate and settings.
        on_window (`Callable`, *optional*): Called with the record every `window` steps.
        window (`int`, *optional*, defaults to `50`): Steps between two calls.
    """
    watch = Watch(record, on_window, window)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    settings = {"use_replay": False} if record.settings is None else record.settings
    started = time.perf_counter()
    with attached(trainer, **settings) as session, redirect_stdout(StringIO()):
        trainer.train()  # prints its summary, which is kept and not shown
    record.seconds = time.perf_counter() - started
    record.means = {key: float(np.mean(values)) for key, values in watch.metrics.items()}
    record.explanation = session.explain() if session.enabled else ""
    return record
