"""One rank of a launch: stored rows beside fresh ones and shaped advantages, by scope and layout; results as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import INJECTED, ZScore
from one_rank import outcome, perform
from scripted import build, mixed, run
from support import Spy

import trl_replay

LAYOUTS = {2: {"whole": (8, 4), "straddling": (6, 4)}, 3: {"whole": (6, 3), "straddling": (4, 3)}}
"""Per number of processes: (rows of a process, num_generations)."""
MIX = {**INJECTED, "replay_seed": 3}
MODES = ("stored", "joint", "split")
METHODS = ("repo", "arpo", "gfpo", "zscore")
"""Presets of trl-replay-papers, and a plugin with running state."""
ITERATIONS = "iterations"
TOKENS = "tokens"
"""An advantage for each token, of stored rows beside fresh ones."""
CAPACITY = 12


def settings_of(name: str) -> dict[str, Any]:
    """A mode of mixing, or a method."""
    if name == TOKENS:
        return {**MIX, "replay_advantages": "stored"}
    if name in MODES:
        return {**MIX, "replay_advantages": name}
    if name == ITERATIONS:
        return {"replay_iterations": "replay", "replay_start": 0, "replay_seed": 3}
    if name in ("gfpo", "zscore"):  # beside a buffer
        return {"replay_plugins": [name], "replay_record": "loss", "replay_start": 0, "replay_seed": 3}
    return {"replay_preset": name, "replay_seed": 3}


def register() -> None:
    trl_replay.register(ZScore(), "zscore")


def unregister() -> None:
    trl_replay.unregister("zscore")


def trained(folder: Path, name: str, scope: str, rows: int, size: int, rank: int, world: int) -> dict[str, Any]:
    """One training of 6 updates; what it stores is bounded alike on any number of processes."""
    capacity = CAPACITY // world if scope == "sharded" else CAPACITY
    replay = {**settings_of(name), "replay_scope": scope, "replay_buffer_size": capacity}
    more: dict[str, Any] = {"num_iterations": 3, "max_steps": 18} if name == ITERATIONS else {"max_steps": 6}
    if name == TOKENS:
        more["trainer_class"] = Credit
    trainer = build(folder, rows, size, mixed, rank=rank, learning_rate=0.1, gradient_checkpointing=False, **more)
    return run(trainer, compared=True, **replay)


def cases(world: int) -> Iterator[tuple[str, str, str]]:
    """Name, scope and layout."""
    for layout in LAYOUTS[world]:
        for scope in ("gathered", "sharded"):
            for mode in (*MODES, ITERATIONS, TOKENS):
                yield mode, scope, layout
    if world == 2:
        for method in METHODS:
            yield method, "sharded", "whole"
        yield "joint", "process", "whole"
        yield "gfpo", "gathered", "straddling"


class Credit(Spy):
    """The stock trainer with an advantage for each token, of both signs in a row."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        shares = torch.tensor([1.0, -0.5, 0.25, 0.0] * 8)[: batch["completion_ids"].size(1)]
        return {**batch, "advantages": batch["advantages"].unsqueeze(1) * shares}


class Differing:
    """Masks another row on each rank, as no advantages hook may."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        shaped = groups.advantages.copy()
        shaped[:, self.rank] = np.nan
        return shaped


class Raising:
    """Fails in the hooks of one kind on rank 1, from the third update on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def fail(self, context: Any) -> None:
        if self.rank == 1 and context.update >= 2:
            raise ZeroDivisionError("no luck on this rank")


class RaisingAdvantages(Raising):
    @trl_replay.hookimpl
    def trl_replay_advantages(self, context: Any) -> None:
        self.fail(context)


class RaisingMixer(Raising):
    @trl_replay.hookimpl
    def trl_replay_mix(self, context: Any) -> None:
        self.fail(context)


FAILING = {"differing": Differing, "raising": RaisingAdvantages, "raising mixer": RaisingMixer}


def failing(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """The error that ends a training whose plugin does what it must not."""
    trl_replay.register(FAILING[name](rank), "failing")
    try:
        trainer = build(folder, 8, 4, mixed, rank=rank, max_steps=6)
        return run(trainer, **MIX, replay_scope="sharded", replay_plugins=["failing"])
    finally:
        trl_replay.unregister("failing")


def registered(folder: Path, case: tuple[str, str, str], rank: int, world: int) -> dict[str, Any]:
    """One case of methods that begin anew with their running state."""
    name, scope, layout = case
    register()
    try:
        return trained(folder, name, scope, *LAYOUTS[world][layout], rank, world)
    finally:
        unregister()


def all_cases(folder: Path, rank: int, world: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for case in cases(world):
        yield " ".join(case), lambda c=case: registered(folder, c, rank, world)
    for name in FAILING if world == 2 else ():
        yield name, lambda n=name: outcome(lambda: failing(folder, n, rank))


if __name__ == "__main__":
    number, out = int(os.environ["RANK"]), Path(sys.argv[1])
    perform(out, all_cases(out / f"trainer{number}", number, int(os.environ["WORLD_SIZE"])))
