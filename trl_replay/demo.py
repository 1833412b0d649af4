"""A combination lock: a task of sparse rewards, on which a tiny model trains on the CPU.

Each of 8 keys opens with one of 256 two-letter codes. Before RL the model is briefly taught to answer with uniformly
random codes, so that one sample in 256 is right and about 97 % of the groups of 8 are dead. A seed stands for a lock
of its own: codes, model, data order, completions.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from . import attached
from .testing import PLAIN, make_model, make_tokenizer

ARMS = ("stock", "replay")
KEYS = 8
LETTERS = "abcdefghijklmnop"
GROUPS = 8
GENERATIONS = 8
HIDDEN_SIZE = 64
LEARNING_RATE = 5e-4
"""Each arm's best of the grid in benchmarks/learning.py, by final reward on seeds that are not shown."""
EVERY = 25
"""Updates between two lines of progress."""


def codes(seed: int) -> dict[str, str]:
    """Return the code that opens each key."""
    rng = random.Random(seed)
    return {str(key): rng.choice(LETTERS) + rng.choice(LETTERS) for key in range(KEYS)}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for the right code, else 0."""
    return [float(completion == code) for completion, code in zip(completions, answer, strict=True)]


@cache
def taught(seed: int, steps: int = 300, rows: int = 256) -> Mapping[str, torch.Tensor]:
    """Return weights of a model that answers every key with a uniformly random code: the same on every call.

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
    """Return a stock `trl.GRPOTrainer` on the lock, with completions of at most 3 tokens; `settings` of
    `GRPOConfig`."""
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()]
    plain = {"seed": seed, "learning_rate": learning_rate, "max_steps": steps, "max_completion_length": 3}
    return toy_trainer(model, rows * 2000, output_dir, **{**plain, **settings})


def toy_trainer(
    model: Any,
    rows: list[dict[str, str]],
    output_dir: str,
    rewards: Callable[..., list[float]] = reward,
    **settings: Any,
) -> Any:
    """Return a stock `trl.GRPOTrainer` of 8 groups of 8 completions an update, whose reward is 1 for the right answer.

    Args:
        model (`PreTrainedModel`): It reads what `make_tokenizer` writes.
        rows (`list[dict]`): With `prompt` and `answer`.
        output_dir (`str`): Where the trainer writes.
        rewards (`Callable`, *optional*): Another reward function, of `completions` and `answer`.
        **settings: Of `GRPOConfig`: what the task is about.
    """
    plain: dict[str, Any] = {
        "output_dir": output_dir,
        "per_device_train_batch_size": GROUPS * GENERATIONS,
        "num_generations": GENERATIONS,
        **PLAIN,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**{**plain, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )


class Progress(TrainerCallback):
    """Prints a line every few updates."""

    def __init__(self, arm: str) -> None:
        self._arm = arm

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        """A step was logged."""
        if "reward" in logs and state.global_step % EVERY == 0:
            print(f"{self._arm}, update {state.global_step}: {logs['reward']:.0%} right", file=sys.stderr)


def train(arm: str, seed: int, steps: int, out: Path) -> None:
    """Train one arm, and save the trainer's state, with its log, in a folder of the arm's name."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"{arm}: teaching the model to answer at random", file=sys.stderr)
    trainer = make_trainer(seed, LEARNING_RATE, steps, str(out / arm))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(arm))
    with attached(trainer, use_replay=arm == "replay"), redirect_stdout(StringIO()):
        trainer.train()
    trainer.save_state()
