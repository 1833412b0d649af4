"""Tasks that no setting was chosen on: many prompts with rewards of 0 and 1, and a thousand with grades.

* vault: four digits open it with two letters, which belong to the first digit and to the last. A completion is right
  or wrong; at first one in 256 is right and about 3 % of the groups are live. No prompt comes twice in 80,000
  completions.
* wide lock: the same with three digits, a thousand prompts.
* grades: three digits and three letters, one for each digit. The reward is the share of letters that are right; at
  first about three groups in four are live.
* long: the two letters of a wide lock, behind 16 that mean nothing. A right answer is as long as a wrong one, and most
  of its log ratio is noise.

What is learned of one prompt helps with others. Before RL the model answers with uniformly random letters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lock import reward, toy_trainer

from trl_replay.demo import LETTERS
from trl_replay.testing import make_model, make_tokenizer

HIDDEN_SIZE = 64


@dataclass(frozen=True)
class Vault:
    """The form of a prompt and its answer: letter i belongs to the digit at `places[i]`.

    `before` is the number of letters that stand before them and mean nothing.
    """

    digits: int
    places: tuple[int, ...]
    before: int = 0

    @property
    def letters(self) -> int:
        """Of a completion."""
        return self.before + len(self.places)


GRADES = Vault(digits=3, places=(0, 1, 2))
LONG = Vault(digits=3, places=(0, 2), before=16)
VAULTS = {
    "vault": Vault(digits=4, places=(0, 3)),
    "wide lock": Vault(digits=3, places=(0, 2)),
    "grades": GRADES,
    "long": LONG,
}


def rows(vault: Vault, seed: int) -> list[dict[str, str]]:
    """All prompts with their answers."""
    rng = random.Random(seed)
    letter_of = [[rng.choice(LETTERS) for _ in range(10)] for _ in vault.places]
    keys = [f"{number:0{vault.digits}d}" for number in range(10**vault.digits)]
    found = []
    for key in keys:
        letters = [letter_of[number][int(key[place])] for number, place in enumerate(vault.places)]
        found.append({"prompt": f"{key}=", "answer": "".join(letters)})
    return found


@cache
def taught(vault: Vault, seed: int, steps: int = 300, rows_a_step: int = 256) -> Mapping[str, torch.Tensor]:
    """Weights of a model that answers every prompt with uniformly random letters: the same on every call."""
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
        key = [draw(digits) for _ in range(vault.digits)]
        answer = [draw(letters) for _ in range(vault.letters)]
        batch = torch.stack([*key, sign, *answer, end], dim=1)
        labels = batch.clone()
        labels[:, : vault.digits + 1] = -100  # the question
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def share_of_letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of an answer's letters that stand in their place; 0 for a completion of another length."""
    scores = []
    for completion, code in zip(completions, answer, strict=True):
        right = sum(map(str.__eq__, completion, code))
        scores.append(right / len(code) if len(completion) == len(code) else 0.0)
    return scores


def last_letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a completion of the right length that ends with the code."""
    pairs = zip(completions, answer, strict=True)
    return [float(len(text) == LONG.letters and text.endswith(code)) for text, code in pairs]


def make_trainer(vault: Vault, seed: int, learning_rate: float, steps: int, output_dir: str, **training: Any) -> Any:
    """A stock `trl.GRPOTrainer` on it: 8 groups of 8 completions an update."""
    model = make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(vault, seed))
    return toy_trainer(
        model,
        rows(vault, seed),
        output_dir,
        {GRADES: share_of_letters, LONG: last_letters}.get(vault, reward),
        seed=seed,
        learning_rate=learning_rate,
        max_steps=steps,
        max_completion_length=vault.letters + 1,
        **training,
    )
