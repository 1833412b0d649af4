"""Runs that write checkpoints and runs that resume from them, and everything in which the two could differ."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import weights_hash

import trl_replay
from trl_replay import compat
from trl_replay.checkpoint import format as saved
from trl_replay.serialization import group_files
from trl_replay.testing import make_trainer
from trl_replay.types import Group

EVICTORS = ("heap", "fifo", "prompt_balanced", "reservoir", "weighted_reservoir")
SAMPLERS = ("proportional", "prompt_balanced", "uniform", "top", "newest")
SCOPES = ("process", "gathered", "sharded")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one iteration": {},
    "two iterations": {"num_iterations": 2},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4},
    "two updates a generation": {"per_device_train_batch_size": 6, "steps_per_generation": 2},
}
PAIRS = [
    (evictor, sampler, SCOPES[(one + two) % 3], list(LAYOUTS)[(one + 2 * two) % 4])
    for (one, evictor), (two, sampler) in itertools.product(enumerate(EVICTORS), enumerate(SAMPLERS))
]
"""Every evictor with every sampler, and with each of them every scope and layout at least once."""
PAIRS_OF_RANKS = [
    (evictor, SAMPLERS[(one + two) % 5], scope, list(LAYOUTS)[(one + two) % 4])
    for (one, evictor), (two, scope) in itertools.product(enumerate(EVICTORS), enumerate(SCOPES))
]
"""Every scope with every evictor, sampler and layout: between an evictor and a sampler there is nothing of ranks."""


def digits(completions: list[str], **_: Any) -> list[float]:
    """Rewards that depend on nothing but the text: at the start about half of the groups of four are dead."""
    return [float(text[:1] in set("01234")) for text in completions]


def build(folder: Path, **settings: Any) -> Any:
    """A trainer that saves every six updates."""
    defaults: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    defaults["gradient_checkpointing"] = False  # which computes the same twice, and saves nothing
    return make_trainer(folder, digits, **{**defaults, **settings})


def train(folder: Path, resume: str | None = None, trainer: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Trains with replay; returns trainer and session. `settings` of replay start with `replay_`."""
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    trainer = trainer or build(folder, **settings)
    session = trl_replay.attach(trainer, **{"replay_buffer_size": 5, **replay})
    with warnings.catch_warnings():
        if torch.distributed.is_initialized():
            warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    return trainer, session


def resume(folder: Path, checkpoint: Path, **settings: Any) -> Any:
    """The session of a run that goes on from a checkpoint to its eighth update."""
    return train(folder, resume=str(checkpoint), **{"max_steps": 8, "save_strategy": "no", **settings})[1]


def last(folder: Path) -> str:
    """The newest complete checkpoint, which must be there."""
    found = trl_replay.last_complete_checkpoint(folder)
    assert found is not None
    return found


def disk(folder: Path, **arguments: Any) -> dict[str, Any]:
    """The settings of a storage on disk."""
    return {"replay_storage": "disk", "replay_storage_kwargs": {"folder": str(folder), **arguments}}


def files(folder: Path) -> list[Path]:
    """The payload that a storage has on disk."""
    return sorted(folder.rglob("*.safetensors"))


class StopError(Exception):
    pass


@contextlib.contextmanager
def stopped_after_loading(trainer: Any, resume: str, **replay: Any) -> Iterator[Any]:
    """A session just after a checkpoint was restored, before anything else happens."""
    session = trl_replay.attach(trainer, **replay)

    def stop(checkpoint: Any) -> None:
        raise StopError

    trainer.__dict__["_load_scaler"] = stop  # what the trainer calls next
    with contextlib.suppress(StopError):
        trainer.train(resume_from_checkpoint=resume)
    del trainer.__dict__["_load_scaler"]
    yield session
    trl_replay.detach(trainer)


def restored(folder: Path, resume: str, trainer: Any = None, **settings: Any) -> dict[str, Any]:
    """The state just after a checkpoint was restored."""
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    trainer = trainer or build(folder, **settings)
    with stopped_after_loading(trainer, resume, **{"replay_buffer_size": 5, **replay}) as session:
        return state(session)


def group_hash(group: Group) -> str:
    digest = hashlib.sha256(str(sorted(group.keys)).encode())
    for name, tensor in sorted(group_files.named(0, group).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state(session: Any) -> dict[str, Any]:
    """All that a checkpoint must bring back, as values that compare."""
    buffer, components, carry = session.buffer, session.components, session.carry
    noted = carry.pending_groups
    rounds = session.rounds
    return {
        "rounds": None if rounds is None else rounds.state_dict(),
        "prompts": None if rounds is None else [column.tolist() for column in rounds.table.state_dict().values()],
        "columns": {name: getattr(buffer.table, name).tolist() for name in buffer.table.names},
        "keysets": [sorted(keys) for keys in buffer.state_dict()["keysets"]],
        "payload": {serial: group_hash(buffer.storage.get(serial)) for serial in buffer.held()},
        "generators": [str(components.rng.bit_generator.state), str(components.local_rng.bit_generator.state)],
        "update": session.update,
        "verified": session.handshake.verified,
        "serial": carry.serial,
        "collected_at": carry.collected_at,
        "unfinished": carry.unfinished,
        "drawn": carry.drawn,
        "measured": {
            name: values.tolist()
            for name, values in session.supply.stats.columns(compat.local_rows(session.trainer)).items()
        },
        "totals": [session.totals.batches, dict(session.totals.counters), dict(session.totals.reasons)],
        "limits": dict(components.rate_limiter.state_dict()),
        "metrics": {key: value for key, value in session.metrics.items() if key != "replay/seconds"},
        "candidates": None if noted is None else [_candidate(candidate) for candidate in noted.candidates],
        "view": None if noted is None else {name: getattr(noted.groups, name).tolist() for name in saved.VIEWS},
        "waiting keys": None if noted is None else [sorted(waiting.keys) for waiting in noted.candidates],
    }


def _candidate(candidate: Any) -> list[Any]:
    records = [None if record is None else record.tolist() for record in candidate.records]
    group = None if candidate.group is None else group_hash(candidate.group)
    return [candidate.serial, candidate.slot, candidate.rows, candidate.update, records, group]


def everything(trainer: Any, session: Any) -> dict[str, Any]:
    """The state and the weights."""
    return {"weights": weights_hash(trainer), **state(session)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in one if not _same(one[name], other[name])]


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) or np.array_equal(one, other)
