"""Trains a trainer with or without replay and keeps what each step showed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainerCallback

from ..trainer.attachment import attached
from .record import WINDOW, Record


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Copies each step's log into a record and calls `on_window` every `window` steps."""

    def __init__(self, record: Record, on_window: Callable[[Record], None] | None, window: int) -> None:
        self.record = record
        self.on_window = on_window
        self.window = window
        self.metrics: dict[str, list[float]] = {}
        self.stdout = sys.stdout

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
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
    trainer: Any, record: Record, on_window: Callable[[Record], None] | None = None, window: int = WINDOW
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
