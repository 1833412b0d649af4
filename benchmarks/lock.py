"""A combination lock: a task of sparse rewards, on which a tiny model trains with stock GRPO and with replay.

Each of 8 keys opens with one of 256 two-letter codes. Before RL the model is briefly taught to answer with uniformly
random codes, so that one sample in 256 is right and about 97 % of the groups of 8 are dead. A seed stands for a lock
of its own (codes, model, data order, completions); both arms train on the same seeds.

An update has 8 groups of 8 completions over all processes, and all processes together keep 64 groups, so that runs
can be compared. The lock trains on the CPU.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .. import attached
from ..testing import make_model, make_tokenizer

KEYS = 8
LETTERS = "abcdefghijklmnop"
GROUPS = 8
GENERATIONS = 8
GROUPS_KEPT = 64
HIDDEN_SIZE = 64
LEARNING_RATES = {"stock": 5e-4, "replay": 5e-4}
"""Each arm's best of the grid in benchmarks/learning.py, by final reward on seeds that are not shown."""
THRESHOLD = 0.25
WINDOW = 50
EVERY = 3.0
"""Seconds between two lines of progress."""
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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


# the task


def codes(seed: int) -> dict[str, str]:
    """The code that opens each key."""
    rng = random.Random(seed)
    return {str(key): rng.choice(LETTERS) + rng.choice(LETTERS) for key in range(KEYS)}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right code, else 0."""
    return [float(completion == code) for completion, code in zip(completions, answer, strict=True)]


@cache
def taught(seed: int, steps: int = 300, rows: int = 256) -> Mapping[str, torch.Tensor]:
    """Weights of a model that answers every key with a uniformly random code: the same on every call.

    Args:
        seed (`int`): Of the model and of the examples.
        steps (`int`, *optional*, defaults to `300`): Supervised updates.
        rows (`int`, *optional*, defaults to `256`): Random examples in each.
    """
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, HIDDEN_SIZE, seed=seed)

    def ids_of(tokens: Iterable[str]) -> torch.Tensor:
        return torch.tensor(tokenizer.convert_tokens_to_ids(list(tokens)))

    keys = ids_of("0123456789"[:KEYS])
    letters = ids_of(LETTERS)
    sign = ids_of("=").expand(rows)
    end = ids_of([tokenizer.eos_token]).expand(rows)
    generator = torch.Generator().manual_seed(seed)

    def drawn(among: torch.Tensor) -> torch.Tensor:
        return among[torch.randint(len(among), (rows,), generator=generator)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        batch = torch.stack([drawn(keys), sign, drawn(letters), drawn(letters), end], dim=1)
        labels = batch.clone()
        labels[:, :2] = -100  # the question
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def make_trainer(seed: int, learning_rate: float, steps: int, output_dir: str, **settings: Any) -> Any:
    """A stock `trl.GRPOTrainer` on the lock, with completions of at most 3 tokens; `settings` of `GRPOConfig`."""
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()]
    plain: dict[str, Any] = {
        "seed": seed,
        "learning_rate": learning_rate,
        "max_steps": steps,
        "max_completion_length": 3,
    }
    return toy_trainer(model, rows * 2000, output_dir, **plain, **settings)


def with_reference(model: Any, folder: str) -> Any:
    """The same model, saved where the trainer finds its reference."""
    from transformers import AutoModelForCausalLM

    model.save_pretrained(f"{folder}/reference")
    make_tokenizer().save_pretrained(f"{folder}/reference")
    return AutoModelForCausalLM.from_pretrained(f"{folder}/reference")


def toy_trainer(
    model: Any,
    rows: list[dict[str, str]],
    output_dir: str,
    rewards: Callable[..., list[float]] = reward,
    **settings: Any,
) -> Any:
    """A stock `trl.GRPOTrainer` of 8 groups of 8 completions an update, whose reward is 1 for the right answer.

    Launched on several processes, these share the 8 groups.

    Args:
        model (`PreTrainedModel`): It reads what `make_tokenizer` writes.
        rows (`list[dict]`): With `prompt` and `answer`.
        output_dir (`str`): Where the trainer writes.
        rewards (`Callable`, *optional*): Another reward function, of `completions` and `answer`.
        **settings: Of `GRPOConfig`: what the task is about.
    """
    if settings.get("beta"):
        model = with_reference(model, output_dir)
    plain: dict[str, Any] = {
        "output_dir": output_dir,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": GROUPS * GENERATIONS // WORLD,
        "num_generations": GENERATIONS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**{**plain, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )


# training


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
        generated = record.rollouts + rows * args.world_size
        record.rollouts = int(logs.get("replay/rollouts", generated))  # what is generated again counts, too
        record.rollouts_at.append(record.rollouts)
        record.tokens = int(logs["num_tokens"])
        for key, value in logs.items():
            if key.startswith("replay/"):
                self.metrics.setdefault(key, []).append(value)
        if self.show and time.monotonic() - self.shown >= EVERY:
            self.shown = time.monotonic()
            self.show(record)


def train(trainer: Any, record: Record, show: Callable[[Record], None] | None = None) -> Record:
    """Trains with `record.settings`, fills in the record and returns it.

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
    with attached(trainer, **settings) as session, redirect_stdout(StringIO()):
        trainer.train()  # prints its summary, which is kept in the record
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
