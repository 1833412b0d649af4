"""Groups of the samples that an asynchronous worker sends, and the trainer as a session sees it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trl_replay import compat
from trl_replay.batch.groups import trainable_sums, with_rewards
from trl_replay.data.rewards import have_equal_rewards, is_rounding_error
from trl_replay.data.tasks import Tasks, encoded, hashed
from trl_replay.data.types import Floats, Group, Groups, Ints
from trl_replay.session import living

from . import compat as asynchronous
from .samples import completion_numbers, conversations, cut_samples, first_trained


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group whose samples are coming.

    Attributes:
        id (`int`): Its id in the worker.
        serial (`int`): Its serial number here.
        rows (`list`): Its samples so far.
        live (`bool`): Whether a sample has shown that the group is live; its samples pass from then on.
    """

    id: int
    serial: int
    rows: list[Any] = field(default_factory=list)
    live: bool = False


@dataclass(frozen=True, slots=True)
class SampleReader:
    """The rule by which samples are read.

    Attributes:
        rewards (`Sequence[str]`): Names of rewards in a sample's metrics.
        counting (`int`, *optional*): The one that counts (`replay_reward`); None for their sum.
        size (`int`): Completions of a group, each of one or more samples.
        tasks ([`Tasks`]): Tells tasks apart.
    """

    rewards: Sequence[str]
    counting: int | None
    size: int
    tasks: Tasks

    def rewards_of(self, sample: Any) -> list[float]:
        """A sample's rewards, NaN where one is missing; the sum alone, where no other is told."""
        told = sample.metrics
        named = [float(told.get(f"rewards/{name}", np.nan)) for name in self.rewards]
        if np.isnan(named).all() and "reward" in told:
            named[0] = float(told["reward"])
        return named

    def are_live(self, samples: Sequence[Any]) -> bool:
        """Tell whether a group of these samples, and of any further ones, is live: one with a trained token has an
        advantage and, where one reward counts, its values differ."""
        alike = self.counting is not None and have_equal_rewards(self._column(samples, self.counting), np.ones(1))[0]
        return can_train(samples) and not alike

    def is_whole(self, samples: Sequence[Any]) -> bool:
        """Tell whether these are samples of as many completions as a group has; further forks may come."""
        return completion_numbers(samples)[-1] + 1 >= self.size

    def is_dead(self, samples: Sequence[Any]) -> bool:
        """Tell whether a group is dead, all of whose samples are there: one that the reward that counts does not score
        is judged by its advantages."""
        unscored = self.counting is not None and np.isnan(self._column(samples, self.counting)).all()
        return not (can_train(samples) if unscored else self.are_live(samples))

    def _column(self, samples: Sequence[Any], function: int) -> Floats:
        """`(1, samples, 1)`: the rewards of one function."""
        return np.array([[[self.rewards_of(sample)[function]] for sample in samples]])

    def view(self, samples: Sequence[Any], update: int, group: Group) -> Groups:
        """The group as decisions see it: a row a completion, whose samples are added up.

        Args:
            samples (`Sequence`): All of its samples.
            update (`int`): Updates done when it was generated.
            group ([`Group`]): Their payload.
        """
        of_row = conversations(samples, self.size)
        firsts = [samples[int(np.flatnonzero(of_row == row)[0])] for row in range(of_row.max() + 1)]
        missing = self.size - len(firsts)
        trainable = np.array([int(sample.completion_mask.sum()) for sample in samples])
        logps = trainable_sums([group])
        rewards = [self.rewards_of(sample) for sample in firsts] + [[np.nan] * len(self.rewards)] * missing
        return Groups(
            rewards=np.array(rewards)[None],
            reward_weights=np.ones(len(self.rewards)),
            advantages=np.array([[sample.advantage for sample in firsts] + [0.0] * missing], np.float64),
            lengths=self._added(group.completion_lengths, of_row),
            trainable=self._added(trainable, of_row),
            dead=np.array([self.is_dead(samples)]),
            update=np.array([update]),
            prompt=np.array([self._task(samples[0])]),
            behavior_logps=self._added(logps, of_row).astype(np.float64),
            masked=np.array([[False] * len(firsts) + [True] * missing]),
            counting=self.counting,
        )

    def _added(self, values: NDArray[Any], of_row: Ints) -> NDArray[Any]:
        """`(1, G)`: sums over each completion's samples."""
        summed = np.zeros((1, self.size), values.dtype)
        np.add.at(summed[0], of_row, values)
        return summed

    def _task(self, sample: Any) -> int:
        if sample.prompt:
            return self.tasks.key({"prompt": sample.prompt})
        return hashed(encoded(sample.input_ids[: first_trained(sample)].tolist()))

    def payload(self, samples: Sequence[Any]) -> Group:
        """The group as it is stored: a row a sample."""
        rewards = [self.rewards_of(sample) for sample in samples]
        return with_rewards(cut_samples(samples), np.array(rewards))


def sample_of_row(row: Any, advantage: float, names: Sequence[str]) -> Any:
    """Make a sample of a row of a file.

    Args:
        row (`Rollout`): With token ids, log-probs, and rewards.
        advantage (`float`): Its advantage.
        names (`Sequence[str]`): Of its rewards.
    """
    nothing = np.zeros(len(row.prompt_ids))
    return asynchronous.rollout_sample()(
        prompt=[],
        completion=[{"role": "assistant", "content": row.label}],
        input_ids=np.concatenate([row.prompt_ids, row.completion_ids]).astype(np.int64),
        completion_mask=np.concatenate([nothing, row.mask * (not row.masked)]).astype(np.int64),
        old_log_probs=np.concatenate([nothing, row.told[compat.OLD_LOGPS]]).astype(np.float32),
        advantage=advantage,
        model_version=0,
        group_id=-1,
        metrics={f"rewards/{name}": value for name, value in zip(names, row.rewards.tolist(), strict=True)},
    )


def can_train(samples: Sequence[Any]) -> bool:
    """Tell whether a sample with a trained token has an advantage."""
    return any(
        not is_rounding_error(
            sample.advantage, (value for name, value in sample.metrics.items() if name.startswith("reward"))
        )
        for sample in samples
        if sample.completion_mask.any()
    )


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
        return asynchronous.worker_functions(self.own) if self.accelerator.is_main_process else []

    @property
    def trained(self) -> set[int]:
        """Ids of the groups that count in epochs."""
        return asynchronous.trained_groups(self.own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)
