"""Environments whose rewards are their own, in every form that TRL knows, for trainers whose policy is scripted."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from patterns import random_of
from replaying import Checked
from replaying import build as build_with
from tools import tool_tokenizer
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_replay.testing import make_model

SIZE = 4
TURNS = 3
OWN_REWARDS = pytest.mark.skipif(
    "get_reward" not in inspect.getsource(GRPOTrainer), reason="this release's environments do not own rewards"
)


def reward_of(rollout: int) -> float | None:
    """Of the rollout of this number: two of five groups are dead, the others have one or two successes."""
    group, row = divmod(rollout, SIZE)
    return float(row < random_of("reward", group).choice([0, 0, 1, 1, 2]))


class Episode:
    """A rollout knows its number; its task is one of three, and its text says which."""

    rollouts = 0
    first = 0
    _score: ClassVar[Callable[[int], float | None]] = staticmethod(reward_of)

    def reset(self, **columns: Any) -> str:
        self.number = Episode.first + Episode.rollouts
        Episode.rollouts += 1
        self.secret = self.number // SIZE % 3
        return self._text()

    def _text(self) -> str:
        return f" {self.secret}"

    def get_reward(self) -> float | None:
        return Episode._score(self.number)


class Varying(Episode):
    """Its text differs from rollout to rollout, and its task is told apart from that."""

    def _text(self) -> str:
        return " x" * (1 + self.number % 3)

    @property
    def task_id(self) -> int:
        return self.secret


class Tooled(Episode):
    """Has a tool, which tells whether a guess is right."""

    def guess(self, number: int) -> str:
        """Tries a number.

        Args:
            number: The guess.

        Returns:
            What happens.
        """
        return "right" if number == self.secret else "wrong"


class Other(Episode):
    """A second kind."""


CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": NUMBER}}\n</tool_call><|im_end|>'


def say(trainer: Any) -> Callable[..., Any]:
    """A policy that calls the tool in every turn but the last."""
    tokenizer, turns = trainer.processing_class, itertools.count()

    def turn(prompt_ids, *args, **kwargs):
        last = next(turns) % TURNS == TURNS - 1
        rows = range(len(prompt_ids))
        words = ["ok" * (1 + row % 2) + "<|im_end|>" if last else CALL.replace("NUMBER", str(row % 3)) for row in rows]
        return [tokenizer(word)["input_ids"] for word in words], None

    return turn


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions of several turns whose middle tokens are an environment's; TRL reads their rewards by column."""
    tokenizer = trainer.processing_class
    first = Episode.first + Episode.rollouts
    Episode.rollouts += len(prompts)
    texts = [f"a{number % 7}*{number % 5}cd"[: 4 + number % 3] for number in range(first, first + len(prompts))]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {
        "prompt_ids": [tokenizer("Go.")["input_ids"] for _ in prompts],
        "completion_ids": ids,
        "logprobs": None,
        "env_mask": [[int(place not in (1, 2)) for place in range(len(row))] for row in ids],
        "rollout": list(range(first, first + len(prompts))),
    }


def of_rollout(completions: Any, rollout: list[int], **columns: Any) -> list[float | None]:
    """The reward function of `rollout`, which tells it the rollouts' numbers."""
    return [Episode._score(number) for number in rollout]


ROWS = [{"prompt": [{"role": "user", "content": text}]} for text in ("Go.", "Open it.", "Try.", "Do.")]
ROUTED = [{**row, "environment": name} for row, name in zip(ROWS, ("one", "two") * 2, strict=True)]
FORMS: dict[str, dict[str, Any]] = {
    "reward and data of its own": {"environment_factory": Episode, "train_dataset": None},
    "reset by rollout": {"environment_factory": Varying, "train_dataset": None},
    "several turns with a tool": {"environment_factory": Tooled, "train_dataset": None},
    "a dict of environments": {"environment_factory": {"one": Episode, "two": Other}},
    "rollout_func with masks": {"rollout_func": rollout},
}


class Counted(TrainerCallback):
    """Notes how many rollouts there were at each step."""

    def __init__(self):
        self.rollouts: dict[int, int] = {}

    def on_save(self, args, state, control, **kwargs):
        self.rollouts[state.global_step] = Episode.rollouts


def build(folder: Path, form: str, begin: int = 0, trainer_class: type = Checked, **settings: Any) -> Any:
    """A trainer with environments of this form; `begin` rollouts were before."""
    Episode.rollouts = begin
    arguments = FORMS[form]
    rows = ROUTED if "dict" in form else ROWS
    tokenizer = tool_tokenizer()
    defaults = {"max_completion_length": 160 if "tool" in form else 6, "chat_template_kwargs": {}, "max_steps": 4}
    trainer = build_with(
        folder, of_rollout if "rollout_func" in form else None, rows, tokenizer,
        make_model(tokenizer, max_position_embeddings=2048), trainer_class, arguments=arguments,
        **{**defaults, **settings},
    )  # fmt: skip
    if "tool" in form:
        trainer._generate_single_turn = say(trainer)
    trainer.counted = Counted()
    trainer.add_callback(trainer.counted)
    return trainer
