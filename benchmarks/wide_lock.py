"""A lock with a thousand keys: many prompts, a reward of 0 or 1, about 3 % of the groups live at first.

A key has three digits. Its code's first letter belongs to the first digit, the second letter to the last digit, so
that what is learned of one key helps with others. Before RL the model answers every key with uniformly random codes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from trl_replay.demo.lock import LETTERS, toy_trainer
from trl_replay.testing import make_model, make_tokenizer

HIDDEN_SIZE = 64


def rows(seed: int) -> list[dict[str, str]]:
    """All keys with their codes."""
    rng = random.Random(seed)
    first = [rng.choice(LETTERS) for _ in range(10)]
    last = [rng.choice(LETTERS) for _ in range(10)]
    keys = [f"{number:03d}" for number in range(1000)]
    return [{"prompt": f"{key}=", "answer": first[int(key[0])] + last[int(key[2])]} for key in keys]


@cache
def taught(seed: int, steps: int = 300, rows_a_step: int = 256) -> Mapping[str, torch.Tensor]:
    """Weights of a model that answers every key with a uniformly random code: the same on every call."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, HIDDEN_SIZE, seed=seed)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    sign = torch.tensor(tokenizer.convert_tokens_to_ids(["="])).expand(rows_a_step)
    end = torch.tensor([tokenizer.eos_token_id]).expand(rows_a_step)
    generator = torch.Generator().manual_seed(seed)

    def draw(among: torch.Tensor) -> torch.Tensor:
        return among[torch.randint(len(among), (rows_a_step,), generator=generator)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        batch = torch.stack([*(draw(digits) for _ in range(3)), sign, draw(letters), draw(letters), end], dim=1)
        labels = batch.clone()
        labels[:, :4] = -100  # the question
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def make_trainer(seed: int, learning_rate: float, steps: int, output_dir: str) -> Any:
    """A stock `trl.GRPOTrainer` on it: 8 groups of 8 completions of at most 3 tokens an update."""
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    return toy_trainer(
        model,
        rows(seed),
        output_dir,
        seed=seed,
        learning_rate=learning_rate,
        max_steps=steps,
        max_completion_length=3,
    )
