"""TRL's AsyncGRPOTrainer on a CPU: its own code, with one kernel written densely and a worker that plays a script."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import trl_replay
from trl_replay.testing import make_model, make_tokenizer

async_grpo = pytest.importorskip("trl.experimental.async_grpo", reason="this release does not ship the trainer")

SIZE = 4
"""Completions of a group."""
LIVE, DEAD = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
"""Rewards of a group."""


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
    *_: Any, softmax_scale: float | None = None, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of packed segments, each to the end of its own path."""
    heads = query.size(1) // key.size(1)
    own_ends, path_ends = starts_q.tolist(), starts_k.tolist()
    bounds = zip(own_ends[:-1], own_ends[1:], path_ends[:-1], path_ends[1:], strict=True)
    parts = []
    for first, last, begin, end in bounds:
        asks = query[first:last].transpose(0, 1)
        keys, values = (part[begin:end].transpose(0, 1).repeat_interleave(heads, 0) for part in (key, value))
        scores = asks @ keys.transpose(-1, -2) * (softmax_scale or query.size(-1) ** -0.5)
        own, all_of = last - first, end - begin
        ahead = torch.arange(all_of) > torch.arange(own)[:, None] + all_of - own
        parts.append((scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts)


def stand_in(monkeypatch):
    """Put the dense kernel in the place of the GPU's, and leave out a look-up of a GPU's name."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: types.SimpleNamespace(flash_attn_varlen_func=dense))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def advantages_of(rewards: Sequence[float]) -> np.ndarray:
    """Advantages as TRL's worker computes them."""
    given = np.array(rewards)
    return (given - given.mean()) / (given.std() + 1e-8)


def samples_of(number: int, rewards: Sequence[float], version: int = 0, forks: int = 1, **told: Any) -> list[Any]:
    """One group's samples, drawn from a generator of its own; the first completion comes in `forks` rows."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    rng = np.random.default_rng(number)
    prompt = rng.integers(3, 20, 5)
    samples = []
    for row, (reward, advantage) in enumerate(zip(rewards, advantages_of(rewards), strict=True)):
        for fork in range(forks if row == 0 else 1):
            completion = rng.integers(3, 20, 4 + row + fork)
            ids = np.concatenate([prompt, completion])
            mask = np.concatenate([np.zeros(5, np.int64), np.ones(len(completion), np.int64)])
            logps = np.where(mask, -2.5 - rng.random(len(ids)), 0.0).astype(np.float32)
            message = [{"role": "assistant", "content": f"{number}/{row}"}]
            metrics = {"reward": float(reward), "rewards/right": float(reward)}
            metrics |= {f"rewards/{name}": float(values[row]) for name, values in told.items()}
            asked = [{"role": "user", "content": str(number)}]
            samples.append(
                RolloutSample(asked, message, ids, mask, logps, float(advantage), version, number, metrics, 0.0)
            )
    return samples


def all_live(number: int, version: int) -> list[Any]:
    return samples_of(number, LIVE, version)


def all_dead(number: int, version: int) -> list[Any]:
    return samples_of(100 + number, DEAD, version)


def every_second_dead(number: int, version: int) -> list[Any]:
    return samples_of(number, DEAD if number % 2 else LIVE, version)


def nothing(number: int, version: int) -> None:
    return None


class Script:
    """A rollout worker that queues the groups of a script, the next one whenever its queue is empty.

    Args:
        groups (`Callable`): Gives the samples of group `number` of policy version `version`; None where nothing comes.
        first (`int`): Number of the first group.
    """

    def __init__(self, groups: Callable[[int, int], list[Any] | None], first: int = 0) -> None:
        self.rollout_buffer = self
        self.metrics_queue: Queue[Any] = Queue()
        self.reward_func_names = ["right"]
        self.version = 0
        self.next = first
        self.waiting: list[Any] = []
        self.checked = 0
        self.failure: Exception | None = None
        self._groups = groups

    def start(self): ...
    def stop(self): ...

    def update_model_version(self, version: int) -> None:
        self.version = version

    def check_health(self, stale_after_s: float) -> None:
        self.checked += 1
        if self.failure:
            raise self.failure

    def qsize(self) -> int:
        return len(self.waiting)

    def put_nowait(self, sample):
        self.waiting.append(sample)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.waiting:
            made = self._groups(self.next, self.version)
            if made is None:
                raise Empty
            self.waiting += made
            self.next += 1
        return self.waiting.pop(0)


class NoTransfer:
    """A weight transfer that transfers nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def send_weights(self, parameters: Iterator[Any]) -> None:
        for _ in parameters:
            pass


@dataclass
class Policy:
    """A tiny model on disk, as the trainer wants it."""

    path: str
    tokenizer: Any


def make_policy(folder: Path) -> Policy:
    """Save a tiny model."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, layers=1, max_position_embeddings=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Policy(str(folder), tokenizer)


def make_async_trainer(folder: Path, policy: Policy, worker: Any, **settings: Any) -> Any:
    """TRL's trainer with a scripted worker."""
    given = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "max_steps": 6, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1, "num_generations": SIZE, "max_completion_length": 16, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no", "token_budget": 64, "learning_rate": 1e-2, "dtype": "float32",
        "disable_tqdm": True,
    }  # fmt: skip
    known = async_grpo.AsyncGRPOConfig.__dataclass_fields__
    taken = {name: value for name, value in {**given, **settings}.items() if name in known}
    args = async_grpo.AsyncGRPOConfig(**taken)
    dataset = Dataset.from_list([{"prompt": str(number)} for number in range(8)])
    return async_grpo.AsyncGRPOTrainer(
        model=policy.path, reward_funcs=right, args=args, train_dataset=dataset, processing_class=policy.tokenizer,
        rollout_worker=worker, weight_transfer=NoTransfer(),
    )  # fmt: skip


def right(**_: Any) -> list[float]:
    """A reward that the script gives instead."""
    return [0.0]


def watch(trainer: Any) -> list[tuple[torch.Tensor, ...]]:
    """Note every micro-batch that the trainer trains on, with its loss."""
    seen: list[Any] = []
    stock = type(trainer).compute_loss

    def noting(model, inputs, *given, **named):
        loss = stock(trainer, model, inputs, *given, **named)
        kept = {name: value.clone() for name, value in inputs.items()}
        seen.append((kept, float(loss.detach())))
        return loss

    trainer.compute_loss = noting
    return seen


class Queued:
    """A trainer with a worker that plays a script, attached, and every sample that its queue has given.

    Args:
        groups: What the worker plays, or the worker.
        settings: Of replay by their names, and of the trainer.
    """

    def __init__(self, folder: Path, policy: Policy, groups: Any = every_second_dead, **settings: Any) -> None:
        replay = {name: settings.pop(name) for name in list(settings) if "replay_" in name}
        self.worker = groups if isinstance(groups, Script) else Script(groups)
        self.trainer = make_async_trainer(folder, policy, self.worker, **settings)
        self.session = trl_replay.attach(self.trainer, **{"replay_start": None, **replay})
        self.queue, self.counters = self.session.queue, self.session.totals.counters
        self.given: list[Any] = []
        stock = self.queue.get

        def get(*args, **kwargs):
            self.given.append(stock(*args, **kwargs))
            return self.given[-1]

        self.queue.get = get

    def train(self) -> Queued:
        self.trainer.train()
        return self

    def get(self, count: int) -> list[Any]:
        """The next samples, as the trainer asks for them."""
        return [self.queue.get(timeout=0.01) for _ in range(count)]

    def ends(self):
        """Nothing more comes."""
        with pytest.raises(Empty):
            self.get(1)

    @property
    def fresh(self) -> list[Any]:
        return [sample for sample in self.given if sample.group_id >= 0]

    @property
    def replayed(self) -> list[Any]:
        return [sample for sample in self.given if sample.group_id < 0]

    @property
    def halves(self) -> set[int]:
        """Whether numbers of fresh groups are even, odd, or both."""
        return {sample.group_id % 2 for sample in self.fresh}
