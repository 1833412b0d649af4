"""An asynchronous trainer as the shared code sees it: the names of a GRPOTrainer, with what they mean here."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ... import compat
from ...session import living


class Arguments:
    """The trainer's settings, with those of its layout: a sample at a time."""

    steps_per_generation = 1
    per_device_train_batch_size = 1

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


class TrainerView:
    """Reads a trainer that it does not keep alive.

    Args:
        trainer (`trl.experimental.async_grpo.AsyncGRPOTrainer`): The trainer.
        rewards (`Sequence[str]`): Names of the rewards that its samples tell, summed with weights of 1.
    """

    scale_rewards = "group"
    multi_objective_aggregation = "sum_then_normalize"
    use_vllm = False  # its worker generates
    rollout_func = None
    beta = 0.0

    def __init__(self, trainer: Any, rewards: Sequence[str]) -> None:
        self._trainer = weakref.ref(trainer)
        self.reward_func_names = list(rewards)
        self.reward_weights = torch.ones(len(self.reward_func_names))
        self.args = Arguments(trainer.args)
        self.num_generations = int(trainer.args.num_generations)
        self.max_completion_length = trainer.args.max_completion_length
        self.chat_template_kwargs = trainer.args.chat_template_kwargs or {}

    @property
    def own(self) -> Any:
        """The trainer itself.

        Raises:
            ReplayError: It no longer exists.
        """
        return living(self._trainer)

    @property
    def reward_funcs(self) -> list[Any]:
        """The worker's reward functions, as far as they can be seen."""
        return compat.worker_functions(self.own) if self.accelerator.is_main_process else []

    @property
    def trained(self) -> set[int]:
        """Ids of the groups that count in epochs."""
        return compat.trained_groups(self.own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)
