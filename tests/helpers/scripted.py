"""Training runs whose completions and rewards are scripted, so that any number of processes makes the same groups.

What a run showed is a dictionary of plain values: tests compare the ranks' ones with each other and with one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from patterns import random_of, table_hash
from support import Spy, record
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer

Live = Callable[[int, int, int], int]
"""`(update, group, first rank of the group)` → how many of its rows get a reward; 0 is a dead group."""
PROMPTS = ["1=", "12=", "123+4=", "7="]
LIMITS = {"replay_unfilled": "exclude", "replay_correction": "per"}
"""Everything that looks at how replay went, and the dead groups that are left out of the loss."""


def mixed(update: int, group: int, rank: int) -> int:
    """Dead in two of three cases."""
    return int(random_of("live", update, group).choice([0, 0, 0, 0, 1, 2]))


def uneven(update: int, group: int, rank: int) -> int:
    """All dead; rank 0 dead and all others live; all live; rank 0 live and all others dead; then mixed."""
    phases = [0, int(rank > 0), 1, int(rank == 0)]
    return phases[update] if update < len(phases) else mixed(update, group, rank)


class Script:
    """Completions and rewards of one process's rows."""

    def __init__(self, live: Live, rows: int, size: int, rank: int) -> None:
        self.live, self.rows, self.size = live, rows, size
        self.first = rank * rows
        self.update = -1
        self.__name__ = "scripted"

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.update += 1
        tokenizer = trainer.processing_class
        ids = []
        for row, prompt in enumerate(prompts, self.first):
            random = random_of("text", prompt, row, self.update)
            ids.append(random.integers(16, 42, random.integers(2, 7)).tolist())
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": ids,
            "logprobs": None,
        }

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        rewards = []
        for row in range(self.first, self.first + len(completions)):
            group, place = divmod(row, self.size)
            rewards.append(float(place < self.live(self.update, group, group * self.size // self.rows)))
        return rewards


class Gradients(TrainerCallback):
    """Keeps every update's whole gradient, after it has been averaged over processes."""

    def __init__(self):
        self.kept: list[np.ndarray] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]  # FSDP has shards
        if whole:  # DeepSpeed keeps them elsewhere
            self.kept.append(torch.cat([grad.flatten() for grad in whole]).double().numpy())


def texts(batch: dict[str, Any], tokenizer: Any) -> list[str]:
    """Prompt and completion of each row, without padding."""
    parts = []
    for side in ("prompt", "completion"):
        rows = zip(batch[f"{side}_ids"], batch[f"{side}_mask"].bool(), strict=True)
        parts.append([tokenizer.decode(ids[mask]) for ids, mask in rows])
    return [f"{prompt}>{completion}" for prompt, completion in zip(*parts, strict=True)]


def build(folder: Path, rows: int, size: int, live: Live, **settings: Any) -> Any:
    """A trainer with this process's part of the script."""
    script = Script(live, rows, size, int(settings.pop("rank", 0)))
    trainer_class = settings.pop("trainer_class", Spy)
    defaults = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0, "ddp_timeout": 120, "max_steps": 7}
    defaults["gradient_checkpointing"] = False  # which computes the same twice, within the layers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            folder, script, prompts=PROMPTS, trainer_class=trainer_class, per_device_train_batch_size=rows,
            num_generations=size, **{**defaults, **settings},
        )  # fmt: skip
    trainer.rollout_func = script.rollout
    return trainer


def run(trainer: Any, compared: bool = False, resume: str | None = None, **replay: Any) -> dict[str, Any]:
    """Trains with replay, from a checkpoint if it is to `resume`, and returns what each step showed on this process,
    with its gradient if it is `compared`."""
    gradients = Gradients()
    if compared:
        trainer.add_callback(gradients)
    session = trl_replay.attach(trainer, **replay)
    steps = record(session)
    hashes, owners, of_steps = [], [], []
    leave_owners = replay.get("replay_scope") != "gathered"
    step, fetch, drawn, loaded = session.step.take, session.scope.fetch, [], []

    def watched(*batch):
        before = len(drawn)
        out = step(*batch)
        of_steps.extend(drawn[before:])
        hashes.append(table_hash(session.buffer.table, leave_owners))
        owners.append(np.bincount(session.buffer.table.owner, minlength=trainer.accelerator.num_processes).tolist())
        return out

    def fetching(requests, load):
        drawn.append([request.serial for request in requests])

        def loading(serial: int) -> Any:
            group = load(serial)
            loaded.append(len(group.completion_lengths))
            return group

        return fetch(requests, loading)

    session.step.take, session.scope.fetch = watched, fetching
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    tokenizer = trainer.processing_class
    return {
        "steps": [
            {
                "fresh": texts(before, tokenizer),
                "out": texts(after, tokenizer),
                "replayed": (after[ROWS][:, 0] < 0).tolist(),
                "advantages_in": by_row(before),
                "advantages_out": by_row(after),
                "items": float(after["num_items_in_batch"]),
                "trained": float(after["completion_mask"].sum()),
                "keys": [list(before), [key for key in after if key != ROWS]],
            }
            for before, after in steps
        ],
        "logged": {name: len(column) for name, column in columns(trainer).items()},
        "hashes": hashes,
        "loaded rows": loaded,
        "values": session.components.success.values,
        "owners": owners,
        "drawn": of_steps,
        "behavior": behavior(trainer),
        "gradients": gradients.kept,
        "counters": dict(session.totals.counters),
        "size": len(session.buffer),
        "entries": session.buffer.table.serial.tolist(),
        "entry_owners": session.buffer.table.owner.tolist(),
        "held": session.buffer.held(),
        "metrics": session.metrics,
        "received": session.scope.received,
    }


def by_row(batch: dict[str, Any]) -> list[float]:
    """A number for each row's advantage; of those of tokens, their sum by place."""
    advantages = batch["advantages"]
    if advantages.dim() == 2:
        places = torch.arange(1.0, 1.0 + advantages.size(1))
        advantages = (advantages * places * batch["completion_mask"]).sum(dim=1)
    found: list[float] = advantages.tolist()
    return found


def columns(trainer: Any) -> dict[str, Any]:
    """Those of the table of completions that the main process logs."""
    logs = trainer._logs
    return {name: logs[name] for name in ("prompt", "completion", "advantages")} | logs["rewards"] | logs["extra"]


def behavior(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """Per text the summed log-probs: those of its own forward when fresh, and those that the loss took when
    replayed."""
    sums: dict[str, dict[str, list[float]]] = {"fresh": {}, "replayed": {}}
    for loss in trainer.losses:
        inputs, logps = loss["inputs"], loss["logps"]
        for row, text in enumerate(texts(inputs, trainer.processing_class)):
            kind = "replayed" if inputs.rows[row, 0] < 0 else "fresh"
            source = inputs["old_per_token_logps"] if kind == "replayed" else logps
            value = float((source[row] * inputs["completion_mask"][row]).double().sum())
            sums[kind].setdefault(text, []).append(value)
    return sums
