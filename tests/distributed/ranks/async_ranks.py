"""One of two ranks that train with AsyncGRPOTrainer: the cases of test_async_ranks.py; results as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from one_rank import perform_apart
from queued import DEAD, LIVE, Policy, Script, make_async_trainer, make_policy, samples_of, stand_in, watch

import trl_replay
from trl_replay.testing import make_tokenizer

RANK = int(os.environ["RANK"])
TIMEOUT = 120
"""Seconds that a collective waits: the machine may be busy."""


def every_second_dead(number: int, version: int) -> list[Any]:
    return samples_of(number, DEAD if number % 2 else LIVE, version)


def all_dead(number: int, version: int) -> list[Any]:
    return samples_of(100 + number, DEAD, version)


def trained(folder: Path, replay: dict[str, Any] | None, resume: int = 0, **settings: Any) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    stand_in(patch)
    model = folder / "model"
    if RANK == 0 and not model.exists():
        make_policy(model)
    dist.barrier()
    policy = Policy(str(model), make_tokenizer())
    script = Script(all_dead if replay and "replay_warm_start" in replay else every_second_dead)
    trainer = make_async_trainer(folder / "run", policy, script, **settings)
    session = None if replay is None else trl_replay.attach(trainer, **replay)
    seen = watch(trainer)
    trainer.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{resume}") if resume else None)
    weights = [float(parameter.detach().double().sum()) for parameter in trainer.model.parameters()]
    result: dict[str, Any] = {"losses": [loss for _, loss in seen], "weights": weights}
    if session is not None:
        session.export(folder / "groups.parquet")
        result |= {
            "update": session.update,
            "size": len(session.buffer),
            "counters": dict(session.totals.counters),
            "explains": session.explain(),
        }
    return result


def cases(folder: Path) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    replays = {"replay_start": None}
    yield "stock", TIMEOUT, partial(trained, folder / "stock", None)
    yield "idle", TIMEOUT, partial(trained, folder / "idle", {**replays, "replay_dry_run": True})
    yield "replay", TIMEOUT, partial(trained, folder / "replay", replays)
    saves = {"save_strategy": "steps", "save_steps": 3}
    yield "saves", TIMEOUT, partial(trained, folder / "saves", replays, **saves)
    yield "resumes", TIMEOUT, partial(trained, folder / "saves", replays, 3, max_steps=8)
    warm = {"replay_warm_start": str(folder / "replay" / "groups.parquet")}
    yield "warms", TIMEOUT, partial(trained, folder / "warms", warm)
    torn = folder / "torn.jsonl"
    torn.write_text('{"prompt": "1="}')
    yield "warms from a torn file", TIMEOUT, partial(trained, folder / "torn", {"replay_warm_start": str(torn)})
    yield "differs", TIMEOUT, partial(trained, folder / "differs", {"replay_max_age": 3 + RANK})


if __name__ == "__main__":
    perform_apart(Path(sys.argv[1]), cases(Path(sys.argv[1], "cases")))
