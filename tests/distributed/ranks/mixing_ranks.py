"""One rank of a launch: stored rows beside fresh ones and shaped advantages, by scope and layout; results as JSON."""

import os

import numpy as np
import torch
from methods import INJECTED, ZScore
from one_rank import own, rank
from scripted import build, mixed, run
from support import Spy, plugin

import trl_replay

LAYOUTS = {2: {"whole": (8, 4), "straddling": (6, 4)}, 3: {"whole": (6, 3), "straddling": (4, 3)}}
"""Per number of processes: (rows of a process, num_generations)."""
MIX = {**INJECTED}
MODES = ("stored", "joint", "split")
METHODS = ("repo", "arpo", "gfpo", "zscore")
"""Presets of trl-replay-papers, and a plugin with running state."""
ITERATIONS = "iterations"
TOKENS = "tokens"
"""An advantage for each token, of stored rows beside fresh ones."""
CAPACITY = 12


def settings_of(name):
    """A mode of mixing, or a method."""
    if name == TOKENS:
        return {**MIX, "replay_advantages": "stored"}
    if name in MODES:
        return {**MIX, "replay_advantages": name}
    if name == ITERATIONS:
        return {"replay_iterations": "replay", "replay_start": 0}
    if name in ("gfpo", "zscore"):  # beside a buffer
        return {"replay_plugins": [name], "replay_record": "loss", "replay_start": 0}
    return {"replay_preset": name}


def register():
    trl_replay.register(ZScore(), "zscore")


def unregister():
    trl_replay.unregister("zscore")


def trained(folder, name, scope, rows, size, rank, world):
    """One training of 6 updates; what it stores is bounded alike on any number of processes."""
    capacity = CAPACITY // world if scope == "gathered" else CAPACITY
    replay = {**settings_of(name), "replay_scope": scope, "replay_buffer_size": capacity}
    more = {"num_iterations": 3, "max_steps": 18} if name == ITERATIONS else {"max_steps": 6}
    if name == TOKENS:
        more["trainer_class"] = Credit
    trainer = build(folder, rows, size, mixed, rank=rank, learning_rate=0.1, gradient_checkpointing=False, **more)
    return run(trainer, compared=True, **replay)


def combinations(world):
    """Name, scope and layout; of whole groups on three processes two: nothing there depends on their number."""
    for layout in LAYOUTS[world]:
        few = (MODES[1], ITERATIONS)
        for mode in few if (world, layout) == (3, "whole") else (*MODES, ITERATIONS, TOKENS):
            yield mode, "gathered", layout
    if world == 2:
        for method in METHODS:
            yield method, "gathered", "whole"
        yield "joint", "process", "whole"
        yield "gfpo", "gathered", "straddling"


class Credit(Spy):
    """The stock trainer with an advantage for each token, of both signs in a row."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        shares = torch.tensor([1.0, -0.5, 0.25, 0.0] * 8)[: batch["completion_ids"].size(1)]
        return {**batch, "advantages": batch["advantages"].unsqueeze(1) * shares}


def differing(folder, rank):
    """The error that ends a training whose plugin masks another row on each rank."""

    def advantages(groups):
        shaped = groups.advantages.copy()
        shaped[:, rank] = np.nan
        return shaped

    with plugin(advantages=advantages) as name:
        trainer = build(folder, 8, 4, mixed, rank=rank, max_steps=6)
        return run(trainer, **MIX, replay_scope="gathered", replay_plugins=[name])


def registered(folder, case, rank, world):
    """One case of methods that begin anew with their running state."""
    name, scope, layout = case
    register()
    try:
        return trained(folder, name, scope, *LAYOUTS[world][layout], rank, world)
    finally:
        unregister()


def cases(launched):
    folder, world = own(launched), int(os.environ["WORLD_SIZE"])
    for case in combinations(world):
        yield " ".join(case), lambda c=case: registered(folder, c, rank(), world)
    if world == 2:
        yield "differing", lambda: differing(folder, rank())
