"""Runs that write checkpoints and runs that resume from them, and everything in which the two could differ."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from methods import INJECTED
from support import weights_hash

import trl_replay
from trl_replay.checkpoint import format as saved
from trl_replay.data.types import Group
from trl_replay.serialization.groups import pack, to_bytes
from trl_replay.testing import make_trainer

EVICTORS = ("heap", "fifo", "prompt_balanced", "reservoir")
SAMPLERS = ("proportional", "prompt_balanced", "uniform", "top", "newest")
SCOPES = ("process", "gathered")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one iteration": {},
    "two iterations": {"num_iterations": 2},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4},
    "two updates a generation": {"per_device_train_batch_size": 6, "steps_per_generation": 2},
}
PROMPTS = tuple(f"{number}=" for number in range(30))
TIMED = {"replay/seconds"}
LIMITS: dict[str, Any] = {
    "replay_start": "pass_rate(0.01)",
    "replay_retire_passes": 4,
    "replay_unfilled": "exclude",
    "replay_correction": "per",
    "learning_rate": 1e-2,
}
ROUNDS: dict[str, dict[str, Any]] = {
    "new prompts": {"replay_refill": "new(rounds=2)"},
    "the same prompts": {"replay_refill": "same(rounds=2)"},
    "no buffer": {"replay_refill": "new(rounds=2)", "replay_buffer_size": 0},
    "a curriculum": {"replay_refill": "new(rounds=1)", "replay_plugins": "curriculum"},
}


def strategies(evictor: str, sampler: str, scope: str) -> dict[str, Any]:
    return {"replay_evictor": evictor, "replay_sampler": sampler, "replay_scope": scope}


def runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs on one process that must end alike when they are interrupted half-way: name and settings.

    Every evictor with every sampler, and with each of them every scope and layout; all that limits replay; rounds of
    further generation, each in two layouts, and each layout with two of them; rows beside fresh ones; log-probs in 16
    bits; and a later epoch: of nine prompts, the sixth update ends the second one.
    """
    for (one, evictor), (two, sampler) in itertools.product(enumerate(EVICTORS), enumerate(SAMPLERS)):
        scope, layout = SCOPES[(one + two) % 2], list(LAYOUTS)[(one + 2 * two) % 4]
        steps = 12 if layout == "two iterations" else 8
        made = {"max_steps": steps, **strategies(evictor, sampler, scope), **LAYOUTS[layout]}
        yield f"{evictor}, {sampler}, {scope}, {layout}", made
    for scope, layout in itertools.product(SCOPES, ("one iteration", "two iterations")):
        yield f"limits and gates, {scope}, {layout}", {**LIMITS, "replay_scope": scope, **LAYOUTS[layout]}
    for (number, (name, settings)), shift in itertools.product(enumerate(ROUNDS.items()), (0, 1)):
        layout = list(LAYOUTS)[(number + shift) % 4]
        yield f"rounds, {name}, {layout}", {"prompts": PROMPTS, **settings, **LAYOUTS[layout]}
    yield "mixed rows", {**INJECTED, "max_steps": 8}
    again = {"num_iterations": 3, "replay_iterations": "replay", "replay_start": 0}
    yield "further iterations, least used first", {**again, "replay_sampler": "least_used"}
    yield "a reference model", {"beta": 0.1}
    yield "a later epoch", {"rows": 9}
    yield "shuffled", {"shuffle_dataset": True}


def runs_on_ranks(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same on several processes: every scope with every evictor, sampler and layout, and rounds.

    Between an evictor and a sampler there is nothing of ranks. A straddling round is a whole batch.
    """
    for (one, evictor), (two, scope) in itertools.product(enumerate(EVICTORS), enumerate(SCOPES)):
        sampler, layout = SAMPLERS[(one + two) % 5], list(LAYOUTS)[(one + two) % 4]
        if ranks == 2 or (one, two) == (0, 0):
            yield (
                f"{evictor}, {sampler}, {scope}, {layout}",
                {**strategies(evictor, sampler, scope), **LAYOUTS[layout]},
            )
    straddling = {2: {"per_device_train_batch_size": 6}, 3: {"per_device_train_batch_size": 4, "num_generations": 3}}
    for scope in SCOPES[1:]:
        again = {"replay_refill": "new(rounds=1)", "prompts": PROMPTS[:24], **straddling[ranks]}
        yield f"straddling, {scope}", {**again, "replay_scope": scope}
    if ranks == 2:
        yield "rounds", {"replay_refill": "new(rounds=2)", "prompts": PROMPTS[:24], "replay_scope": "process"}


class Curriculum:
    """Skips what is solved, and tries again what was dead last."""

    @trl_replay.hookimpl
    def trl_replay_inputs(self, groups_of_rows, context):
        keys = [context.key(row) for row in groups_of_rows]
        dead = context.prompts.get("dead_streak", keys, default=0) > 0
        again = context.prompt_rows(context.prompts.key[context.prompts.dead_streak == 1][:1])
        rows = [*again, *context.new_prompts(int(dead.sum())), *groups_of_rows]
        return rows[: len(groups_of_rows)]


def digits(completions: list[str], **_: Any) -> list[float]:
    """Rewards that depend on nothing but the text: at the start about half of the groups of four are dead."""
    return [float(text[:1] in set("01234")) for text in completions]


def build(folder: Path, rows: int = 0, **settings: Any) -> Any:
    """A trainer that saves every six updates; with so many rows of data, if they are given."""
    defaults: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    defaults["gradient_checkpointing"] = False  # which computes the same twice, and saves nothing
    trainer = make_trainer(folder, digits, **{**defaults, **settings})
    if rows:
        trainer.train_dataset = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(rows)])
    return trainer


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


def interrupted(folder: Path, at: int = 0, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """All that a run ends with, and in which respects one that resumes half-way, or `at` an update, differs."""
    at = at or settings.get("max_steps", 12) // 2
    whole = everything(*train(folder, **{**settings, "save_steps": at}))
    resumed = everything(*train(folder, resume=str(folder / f"checkpoint-{at}"), **{**settings, "save_steps": at}))
    return whole, differences(whole, resumed)


def resume(folder: Path, checkpoint: Path, **settings: Any) -> Any:
    """The session of a run that goes on from a checkpoint to its eighth update."""
    return train(folder, resume=str(checkpoint), **{"max_steps": 8, "save_strategy": "no", **settings})[1]


def last(folder: Path) -> str:
    """The newest complete checkpoint, which must be there."""
    found = trl_replay.last_complete_checkpoint(folder)
    assert found is not None
    return found


def rewrite(rank: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what a rank's files in a checkpoint say of themselves, as somebody could who hands them on."""
    path = rank / "state.json"
    state = json.loads(path.read_text())
    change(state["content"])
    path.write_text(json.dumps({**state, "checksum": saved._digest(state["content"])}))


class StopError(Exception):
    pass


@contextlib.contextmanager
def stopped_after_loading(trainer: Any, resume: str, **replay: Any) -> Iterator[Any]:
    """A session just after a checkpoint was restored, before anything else happens."""
    session = trl_replay.attach(trainer, **replay)

    def stop(checkpoint):
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
    return hashlib.sha256(to_bytes([pack(group)]).numpy().tobytes()).hexdigest()


def state(session: Any) -> dict[str, Any]:
    """All that a checkpoint must bring back, as values that compare."""
    buffer, carry = session.buffer, session.step.carry
    rounds = session.step.rounds
    return {
        "rounds": None if rounds is None else rounds.state_dict(),
        "prompts": None if rounds is None else [column.tolist() for column in rounds.table.state_dict().values()],
        "columns": {name: getattr(buffer.table, name).tolist() for name in buffer.table.names},
        "keysets": [sorted(keys) for keys in buffer.state_dict()["keysets"]],
        "payload": {serial: group_hash(buffer.load(serial)) for serial in buffer.held()},
        "generators": buffer.generators.state_dict(),
        "update": session.update,
        "verified": session.step.handshake.verified,
        "serial": buffer.serial,
        "collected_at": carry.collected_at,
        "unfinished": carry.unfinished,
        "totals": [session.totals.batches, dict(session.totals.counters), dict(session.totals.reasons)],
        "limits": dict(buffer.policy.limiter.state_dict()),
        "metrics": {key: value for key, value in session.metrics.items() if key not in TIMED},
    }


def everything(trainer: Any, session: Any) -> dict[str, Any]:
    """The state and the weights."""
    return {"weights": weights_hash(trainer), **state(session)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in one if not _same(one[name], other[name])]


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) or np.array_equal(one, other)
