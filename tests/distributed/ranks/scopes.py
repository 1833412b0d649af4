"""One rank of a launch: every case of tests/distributed/test_scopes.py in turn; results as JSON files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from one_rank import outcome, perform
from scripted import LIMITS, build, mixed, run, uneven

import trl_replay
from trl_replay.buffer.replay_buffer import ReplayBuffer
from trl_replay.strategies import scopes
from trl_replay.strategies.corrections import ratio
from trl_replay.strategies.scorers import advantage_std

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYOUTS = {  # per number of processes: (rows of a process, num_generations), whole groups first and then straddling
    2: {"whole": (8, 4), "straddling": (6, 4)},
    3: {"whole": (6, 3), "straddling": (4, 3)},
    4: {"whole": (4, 4), "straddling": (5, 4), "one group on all": (2, 8)},
}
REPLAY = {"replay_buffer_size": 6, "replay_seed": 3}
COMPARED = {"replay_buffer_size": 4, "replay_seed": 3}
LOSS_TYPES = ("dapo", "grpo", "dr_grpo")


def trained(folder: Path, layout: str, live: Any = uneven, settings: Any = None, **replay: Any) -> dict[str, Any]:
    rows, size = LAYOUTS[WORLD][layout]
    return run(build(folder, rows, size, live, rank=RANK, **(settings or {})), **{**REPLAY, **replay})


def often(update: int, group: int, rank: int) -> int:
    """On every rank something to store and something to fill, all the time."""
    return group % 2


def rare(update: int, group: int, rank: int) -> int:
    """One group of rank 0 is live, once."""
    return int(update == group == 0)


def at_first(update: int, group: int, rank: int) -> int:
    """All live, and then all dead."""
    return int(update == 0)


class Raising:
    """A strategy that raises on rank 1 from the third update on."""

    def __init__(self, strategy: Callable[..., Any]) -> None:
        self.strategy = strategy

    def __call__(self, values: Any, context: Any) -> Any:
        if RANK == 1 and context.update >= 2:
            raise ZeroDivisionError("no luck on this rank")
        return self.strategy(values, context)


class Measuring:
    """A plugin whose metrics hook raises on rank 1, from an update on."""

    def __init__(self, update: int) -> None:
        self.update = update

    @trl_replay.hookimpl
    def trl_replay_metrics(self, context: Any) -> dict[str, float]:
        if RANK == 1 and context.update >= self.update:
            raise ZeroDivisionError("no luck on this rank")
        return {}


def without_memory(method: str, attempt: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """An attempt in which a method of the buffer raises on rank 1."""

    def outcome_of_attempt() -> dict[str, Any]:
        if RANK != 1:
            return attempt()
        with mock.patch.object(ReplayBuffer, method, side_effect=MemoryError(f"no memory to {method}")):
            return attempt()

    return outcome_of_attempt


class Wrapped:
    """A third party's scope: four verbs and how it divides a buffer, around somebody else's."""

    def __init__(self, scope: Any) -> None:
        self.share, self.agree, self.admit, self.fetch = scope.share, scope.agree, scope.admit, scope.fetch
        self.division, self.received = scope.division, scope.received


class ScopePlugin:
    @trl_replay.hookimpl
    def trl_replay_strategies(self) -> Any:
        return [
            trl_replay.ScopeSpec("own", lambda accelerator: Wrapped(scopes.ProcessScope(accelerator)), "own"),
            trl_replay.ScopeSpec("all", lambda accelerator: Wrapped(scopes.GatheredScope(accelerator)), "one for all"),
        ]


def by_rank(groups: Any, context: Any) -> Any:
    """A broken scorer: gives other scores on another rank."""
    return np.arange(len(groups), dtype=float) * (1 if RANK == 0 else -1) + 10


def drawing(rows: Any, context: Any) -> Any:
    """A correction that draws as often as this rank has replayed rows."""
    context.rng.random(len(rows.advantages))
    return ratio(rows, context)


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for scope in ("process", "gathered", "sharded"):
        for layout in LAYOUTS[WORLD]:
            if scope == "process" and layout != "whole":
                refused = lambda s=scope: trained(folder, "straddling", replay_scope=s)  # noqa: E731
                yield f"{scope} {layout}", lambda call=refused: outcome(call)
            else:
                yield f"{scope} {layout}", lambda s=scope, n=layout: trained(folder, n, replay_scope=s)
    if WORLD != 2:
        return
    for scope in ("process", "gathered", "sharded"):
        yield (
            f"waiting {scope}",
            lambda s=scope: trained(folder, "whole", rare, {"max_steps": 12}, replay_scope=s, replay_buffer_size=64),
        )
        passes = {"replay_sampler": "least_used", "replay_max_fraction": 0.5, "replay_start": 0}
        yield (f"passes {scope}", lambda s=scope, p=passes: trained(folder, "whole", at_first, replay_scope=s, **p))
    yield from comparable(folder, *LAYOUTS[2]["whole"])
    for layout in LAYOUTS[2]:
        yield (
            f"copies {layout}",
            lambda n=layout: trained(folder, n, mixed, replay_scope="gathered", replay_unfilled="intra_batch"),
        )
    for name, rows in (("few groups", 8), ("straddling groups", 6), ("groups enough", 16)):
        yield f"auto, {name}", lambda r=rows: chosen(folder, r)
    yield from failing(folder)
    trl_replay.register(ScopePlugin(), "third_party")
    yield "third party's own", lambda: trained(folder, "whole", replay_scope="third_party/own")
    yield "third party's all", lambda: trained(folder, "straddling", replay_scope="third_party/all")
    yield "third party's own, straddling", lambda: outcome(lambda: trained(folder, "straddling", replay_scope="own"))
    yield "third party's object", lambda: outcome(lambda: with_object(folder))
    settings = {"replay_scope": "gathered", "replay_correction": drawing}
    yield "a correction that draws", lambda: trained(folder, "straddling", mixed, **settings)


def with_object(folder: Path) -> None:
    trainer = build(folder, 8, 4, uneven, rank=RANK, max_steps=4)
    run(trainer, replay_scope=Wrapped(scopes.ProcessScope(trainer.accelerator)), **REPLAY)


def chosen(folder: Path, rows: int) -> dict[str, Any]:
    """The scope that the default chooses for so many rows a process, in groups of 4."""
    trainer = build(folder, rows, 4, uneven, rank=RANK, max_steps=2)
    session = trl_replay.attach(trainer, replay_buffer_size=3)
    trainer.train()
    explained = session.explain()
    return {"scope": session.config.replay_scope, "capacity": session.buffer.capacity, "explained": explained}


def comparable(folder: Path, rows: int, size: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Runs that any number of processes must do alike, at one global batch."""
    for loss_type in LOSS_TYPES:
        for scope in ("gathered", "sharded"):
            replay = {**COMPARED, "replay_scope": scope}
            if scope == "sharded":  # capacity is per process there
                replay["replay_buffer_size"] //= WORLD
            settings = {"loss_type": loss_type, "max_steps": 6, "rank": RANK}
            settings["gradient_checkpointing"] = loss_type == "dapo"
            for name, limits in ((f"{loss_type} {scope}", {}), (f"limits {loss_type} {scope}", LIMITS)):
                yield (
                    name,
                    lambda s=settings, r={**replay, **limits}: run(
                        build(folder, rows, size, mixed, **s), compared=True, **r
                    ),
                )


def failing(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    def attempt(layout: str = "whole", live: Any = mixed, **settings: Any) -> Callable[[], dict[str, Any]]:
        return lambda: outcome(lambda: trained(folder, layout, live, {"max_steps": 6}, **settings))

    for scope in ("process", "sharded"):
        yield f"a scorer, {scope}", attempt(live=often, replay_scope=scope, replay_scorer=Raising(advantage_std))
    for scope in ("process", "gathered"):
        yield f"a correction, {scope}", attempt(live=often, replay_scope=scope, replay_correction=Raising(ratio))
    trl_replay.register(Measuring(0), "measuring")
    trl_replay.register(Measuring(5), "measuring_late")
    yield "a metrics hook", attempt(replay_scope="process", replay_plugins=["measuring"])
    yield "a metrics hook in the last step", attempt(replay_scope="sharded", replay_plugins=["measuring_late"])
    yield "a group that can't be loaded", without_memory("load", attempt(replay_scope="sharded"))
    yield "a group that can't be kept", without_memory("receive", attempt(replay_scope="gathered"))
    yield "a scorer that differs", attempt(live=uneven, replay_scope="gathered", replay_scorer=by_rank,
                                           replay_buffer_size=1)  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    perform(folder, cases(folder / f"trainer{RANK}"))
