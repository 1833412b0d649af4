"""The dense control: 3-digit addition from a half-trained model, where most groups are live and replay should do no
harm."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from lock import reward, toy_trainer

from trl_replay.testing import make_model, make_tokenizer

HIDDEN_SIZE = 128
HELD_OUT = 4000


@cache
def held_out() -> frozenset[tuple[int, int]]:
    """Problems that no model is ever taught or trained on."""
    rng = random.Random(99)
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < HELD_OUT:
        pairs.add((rng.randrange(1000), rng.randrange(1000)))
    return frozenset(pairs)


def problems(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions and answers that are not held out."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        pair = (rng.randrange(1000), rng.randrange(1000))
        if pair not in held_out():
            found.append(_write(*pair))
    return found


def _write(left: int, right: int) -> tuple[str, str]:
    return f"{left:03d}+{right:03d}=", f"{left + right:04d}"


@cache
def taught(steps: int = 258, rows: int = 128) -> Mapping[str, torch.Tensor]:
    """Weights of the half-trained model: about 13 % of greedy answers are right. The same on every call."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, HIDDEN_SIZE)
    data = problems(steps * rows, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        texts = ["".join(pair) for pair in data[step * rows : (step + 1) * rows]]
        ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts])
        labels = ids.clone()
        labels[:, :8] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def accuracy(model: Any, batch_size: int = 1000) -> float:
    """Share of the held-out problems that the model answers right, greedily."""
    tokenizer = make_tokenizer()
    questions, answers = zip(*[_write(*pair) for pair in sorted(held_out())], strict=True)
    was_training, right = model.training, 0
    model.eval()
    for at in range(0, len(questions), batch_size):
        ids = torch.tensor([tokenizer.encode(question) for question in questions[at : at + batch_size]])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(out[:, ids.size(1) :], skip_special_tokens=True)
        right += sum(text == answer for text, answer in zip(texts, answers[at : at + batch_size], strict=True))
    model.train(was_training)
    return right / len(questions)


def make_trainer(
    seed: int, learning_rate: float, steps: int, output_dir: str, rewards: Any = reward, **training: Any
) -> Any:
    """A stock `trl.GRPOTrainer` on addition: 8 groups of 8 completions of at most 6 tokens an update. `training` are
    further settings of `GRPOConfig`; another reward function may grade."""
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught())
    rows = [{"prompt": question, "answer": answer} for question, answer in problems(20_000, seed=1000 + seed)]
    return toy_trainer(
        model,
        rows,
        output_dir,
        rewards,
        seed=seed,
        learning_rate=learning_rate,
        max_steps=steps,
        max_completion_length=6,
        **training,
    )
