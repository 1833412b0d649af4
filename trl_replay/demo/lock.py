"""The combination lock: a task so sparse that stock GRPO trains on dead groups most of the time.

Each of 8 keys opens with one of 256 two-letter codes. Before RL the model is briefly taught to answer with uniformly
random codes, so that one sample in 256 is right and about 97 % of the groups of 8 are dead. A seed stands for a lock
of its own: codes, model, data order and completions; arms are compared on the same seeds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from ..testing import make_model, make_tokenizer
from .puzzle import KEYS, LETTERS, codes, reward
from .record import Record
from .training import train

GROUPS = 8
GENERATIONS = 8
HIDDEN_SIZE = 64
LEARNING_RATES = {"stock": 5e-4, "replay": 5e-4}
"""Each arm's best of the grid in benchmarks/learning.py, by final reward on seeds that are not shown."""


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

    def draw(among: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(len(among), (rows,), generator=generator)
        return among[chosen]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        answers = [draw(keys), sign, draw(letters), draw(letters), end]
        batch = torch.stack(answers, dim=1)
        labels = batch.clone()
        labels[:, :2] = -100  # the question
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def make_trainer(seed: int, learning_rate: float, steps: int, output_dir: str, **settings: Any) -> Any:
    """A stock `trl.GRPOTrainer` on the lock: 8 groups of 8 completions of at most 3 tokens an update.

    Launched on several processes, these share the 8 groups. Further settings are those of `GRPOConfig`.
    """
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()]
    return toy_trainer(
        model,
        rows * 2000,
        output_dir,
        seed=seed,
        learning_rate=learning_rate,
        max_steps=steps,
        max_completion_length=3,
        **settings,
    )


def toy_trainer(
    model: Any,
    rows: list[dict[str, str]],
    output_dir: str,
    rewards: Callable[..., list[float]] = reward,
    **settings: Any,
) -> Any:
    """A stock `trl.GRPOTrainer` of 8 groups of 8 completions an update, whose reward is 1 for the right answer.

    Args:
        model (`PreTrainedModel`): It reads what `make_tokenizer` writes.
        rows (`list[dict]`): With `prompt` and `answer`.
        output_dir (`str`): Where the trainer writes.
        rewards (`Callable`, *optional*): Another reward function, of `completions` and `answer`.
        **settings: Of `GRPOConfig`: what the task is about.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plain: dict[str, Any] = {
        "output_dir": output_dir,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": GROUPS * GENERATIONS // processes,
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


def run(
    arm: str,
    seed: int,
    learning_rate: float,
    steps: int,
    settings: dict[str, Any] | None = None,
    on_window: Callable[[Record], None] | None = None,
    window: int = 50,
) -> Record:
    """Trains one arm on the lock.

    Args:
        arm (`str`): Its name in tables.
        seed (`int`): Of the lock and of the trainer.
        learning_rate (`float`): Constant.
        steps (`int`): Updates, each of 64 completions.
        settings (`dict`, *optional*): Of [`ReplayConfig`]; None is stock.
        on_window (`Callable`, *optional*): Called with the record so far every `window` steps.
        window (`int`, *optional*, defaults to `50`): Steps between two calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(seed, learning_rate, steps, folder)
        record = Record(arm, seed, learning_rate, settings)
        return train(trainer, record, on_window, window)
