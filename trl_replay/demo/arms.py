"""Trains the arms side by side, each in a process of its own with one thread, and tells how they get on."""

from __future__ import annotations

import multiprocessing
import os
import queue
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .record import Record

ARMS: dict[str, dict[str, Any] | None] = {"stock": None, "replay": {}}
STEPS = 10
"""Updates between two pieces of news, over which they average."""
PAUSE = 1.0
"""Seconds without news after which the listener is called all the same."""

_inbox: Any = None  # in a process that trains: where its news go


@dataclass(frozen=True, slots=True)
class News:
    """How one run gets on.

    Attributes:
        arm (`str`): The arm's name.
        seed (`int`): The run's seed.
        done (`int`): Updates so far.
        reward (`float`): Mean reward of the last few updates.
        dead (`float`): Share of dead groups among those that they generated.
        dead_after (`float`): Share of dead groups among those that they trained on.
    """

    arm: str
    seed: int
    done: int
    reward: float
    dead: float
    dead_after: float


def train_arms(seeds: Sequence[int], steps: int, listen: Callable[[News | None], None]) -> list[Record]:
    """Trains every arm on every seed, the arms side by side.

    Args:
        seeds (`Sequence[int]`): One run of each arm a seed, one after the other.
        steps (`int`): Updates a run.
        listen (`Callable`): Gets the news, and None where there are none for a while.

    Returns:
        `list[Record]`: Arm by arm, in the order of the seeds.
    """
    context = multiprocessing.get_context("spawn")
    inbox = context.Queue()
    with ProcessPoolExecutor(len(ARMS), context, _send_to, (inbox,)) as pool:
        futures = [pool.submit(train_arm, arm, seeds, steps) for arm in ARMS]
        while not all(future.done() for future in futures):
            try:
                listen(inbox.get(timeout=PAUSE))
            except queue.Empty:
                listen(None)
        return [record for future in futures for record in future.result()]


def _send_to(inbox: Any) -> None:
    """The first thing that a process does: before torch is imported, which starts as many threads as it may."""
    global _inbox
    _inbox = inbox
    os.environ["OMP_NUM_THREADS"] = "1"


def train_arm(arm: str, seeds: Sequence[int], steps: int) -> list[Record]:
    """Trains one arm on every seed, in this process."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    from . import lock

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rate = lock.LEARNING_RATES[arm]
    return [lock.run(arm, seed, rate, steps, ARMS[arm], partial(_report, seed), STEPS) for seed in seeds]


def _report(seed: int, record: Record) -> None:
    dead = float(np.mean(record.dead[-STEPS:]))
    after = float(np.mean(record.dead_after[-STEPS:]))
    _inbox.put(News(record.arm, seed, len(record.reward), record.final(STEPS), dead, after))
