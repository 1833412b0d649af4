"""From a group's samples to what decisions see of it and what is stored, and back to samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import compat
from ..buffer.candidates import trainable_sums, with_rewards
from ..compat import OLD_LOGPS
from ..data.fields import ADVANTAGES
from ..data.rewards import NOISE
from ..data.tasks import Tasks, encoded, hashed
from ..data.types import Floats, Group, Groups, Ints

ADVANTAGE_NOISE, LARGEST_NOISE = 1e-6, 0.5
"""Advantages of the first size or less, times the largest reward if that is above 1, are 0: rounding errors of
rewards, which TRL divides by 1e-8, are a tenth of it. Half a standard deviation never is an error."""
REPLAYED = [{"role": "assistant", "content": "(a replayed sample)"}]
"""In the place of a replayed sample's messages, which only traces show."""
HELD = frozenset({"prompt_ids", "completion_ids", "completion_mask", "tool_mask", ADVANTAGES, OLD_LOGPS})
"""Batch keys that a stored group can restore."""


@dataclass(slots=True, eq=False)
class Arriving:
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
class Reading:
    """The rule by which samples are read.

    Attributes:
        rewards (`Sequence[str]`): Names of rewards in a sample's metrics.
        counting (`int`, *optional*): The one that counts (`replay_reward`); None for their sum.
        size (`int`): Completions of a group, each of one or more samples.
        tasks ([`Tasks`]): Tells tasks apart.
        logps_dtype (`torch.dtype`): How log-probs are stored.
    """

    rewards: Sequence[str]
    counting: int | None
    size: int
    tasks: Tasks
    logps_dtype: torch.dtype

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
        if not any(_has_advantage(sample) and sample.completion_mask.any() for sample in samples):
            return False
        if self.counting is None:
            return True
        values = np.array([self.rewards_of(sample)[self.counting] for sample in samples])
        seen = values[np.isfinite(values)]
        return len(seen) > 1 and bool(np.ptp(seen) > NOISE * np.abs(seen).max())

    def is_dead(self, samples: Sequence[Any]) -> bool:
        """Tell whether a group is dead, all of whose samples are there: one that the reward that counts does not score
        is judged by its advantages."""
        if self.are_live(samples):
            return False
        if self.counting is not None and all(np.isnan(self.rewards_of(one)[self.counting]) for one in samples):
            return not any(_has_advantage(sample) and sample.completion_mask.any() for sample in samples)
        return True

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
        logps = trainable_sums(group).numpy()
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
        starts = [first_trained(sample) for sample in samples]
        prompts = [sample.input_ids[:start] for sample, start in zip(samples, starts, strict=True)]
        if all(np.array_equal(prompt, prompts[0]) for prompt in prompts):
            prompts = prompts[:1]
        rest = [slice(start, None) for start in starts]
        ids = [sample.input_ids[part] for sample, part in zip(samples, rest, strict=True)]
        masks = [sample.completion_mask[part] for sample, part in zip(samples, rest, strict=True)]
        logps = [sample.old_log_probs[part] for sample, part in zip(samples, rest, strict=True)]
        tensors = {
            "prompt_ids": _flat(prompts, torch.int32),
            "completion_ids": _flat(ids, torch.int32),
            ADVANTAGES: torch.tensor([float(sample.advantage) for sample in samples], dtype=torch.float64),
            OLD_LOGPS: _flat(logps, self.logps_dtype),
        }
        if not all(np.all(mask) for mask in masks):
            tensors["tool_mask"] = _flat(masks, torch.int8)
        lengths = [np.array([len(part) for part in parts], np.int64) for parts in (prompts, ids)]
        group = Group(tensors, HELD, *lengths)
        return with_rewards(group, np.array([self.rewards_of(sample) for sample in samples]))


def conversations(samples: Sequence[Any], size: int) -> Ints:
    """The number of each sample's completion. Of more samples than `size`, a fork's follow each other, with one
    message and one reward; what that does not explain counts to the last completion."""
    if len(samples) <= size:
        return np.arange(len(samples))
    numbers = [0]
    for before, sample in itertools.pairwise(samples):
        forked = sample.completion == before.completion and sample.advantage == before.advantage
        numbers.append(numbers[-1] + (not forked))
    return np.minimum(numbers, size - 1)


def first_trained(sample: Any) -> int:
    """Tokens before the first one that is trained on; without any, all but the last."""
    trained = np.flatnonzero(sample.completion_mask)
    return int(trained[0]) if len(trained) else len(sample.input_ids) - 1


def samples_of(group: Group, weights: Floats) -> list[Any]:
    """A stored group's samples as the queue gives them, without version and id.

    Args:
        group ([`Group`]): As stored.
        weights (`(rows,)`): Of its rows in the loss, by which their advantages are multiplied.
    """
    make = compat.rollout_sample()
    lengths = group.completion_lengths.tolist()
    parts = {
        key: torch.split(tensor, lengths)
        for key, tensor in group.tensors.items()
        if key in ("completion_ids", OLD_LOGPS)
    }
    masks = group.tensors.get("tool_mask")
    prompts = torch.split(group.tensors["prompt_ids"], group.prompt_lengths.tolist())
    prompts = prompts * len(lengths) if len(prompts) == 1 else prompts
    split = [torch.ones(length) for length in lengths] if masks is None else torch.split(masks, lengths)
    samples = []
    for row, (prompt, mask) in enumerate(zip(prompts, split, strict=True)):
        nothing = np.zeros(len(prompt))
        samples.append(
            make(
                prompt=[],
                completion=REPLAYED,
                input_ids=torch.cat([prompt, parts["completion_ids"][row]]).numpy().astype(np.int64),
                completion_mask=np.concatenate([nothing, mask.numpy()]).astype(np.int64),
                old_log_probs=np.concatenate([nothing, parts[OLD_LOGPS][row].float().numpy()]).astype(np.float32),
                advantage=float(group.tensors[ADVANTAGES][row]) * float(weights[row]),
                model_version=0,
                group_id=-1,
                metrics={},
            )
        )
    return samples


def _has_advantage(sample: Any) -> bool:
    """Tell whether a sample's advantage is more than a rounding error of its rewards."""
    rewards = [abs(value) for name, value in sample.metrics.items() if name.startswith("reward") and value == value]
    noise = min(ADVANTAGE_NOISE * max(1.0, *rewards), LARGEST_NOISE)
    return bool(abs(sample.advantage) > noise)


def _flat(parts: Sequence[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part) for part in parts])).to(dtype)
