"""One rank of a launch: every case of tests/distributed/test_scopes.py in turn; results as JSON files."""

import json
import os
from unittest import mock

import numpy as np
import torch
from methods import INJECTED
from one_rank import own
from scripted import LIMITS, build, mixed, run, uneven
from support import Act, plugin_class

import trl_replay
from trl_replay.buffer.replay_buffer import OTHER_RULE, ReplayBuffer
from trl_replay.strategies.corrections import ratio
from trl_replay.strategies.policies import advantage_std

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYOUTS = {  # per number of processes: (rows of a process, num_generations), whole groups first and then straddling
    2: {"whole": (8, 4), "straddling": (6, 4)},
    4: {"whole": (4, 4), "straddling": (5, 4), "one group on all": (2, 8)},
}
REPLAY = {"replay_buffer_size": 6}
HOOKS = {
    "a metrics hook": ("metrics", 0, {"replay_scope": "process"}),
    "a metrics hook in the last step": ("metrics", 5, {"replay_scope": "gathered"}),
    "an advantages hook": ("advantages", 2, {"replay_scope": "gathered", **INJECTED}),
    "a mix hook": ("mix", 2, {"replay_scope": "gathered", **INJECTED}),
    "an inputs hook": ("inputs", 1, {"replay_scope": "gathered", "replay_refill": "new(rounds=1)"}),
}
"""Hooks that fail on one rank, and from which update on."""
LOSS_TYPES = ("dapo", "grpo", "dr_grpo")


def trained(folder, layout, live=uneven, settings=None, **replay):
    rows, size = LAYOUTS[WORLD][layout]
    return run(build(folder, rows, size, live, rank=RANK, **(settings or {})), **{**REPLAY, **replay})


def often(update, group, rank):
    """On every rank something to store and something to fill, all the time."""
    return group % 2


def rare(update, group, rank):
    """One group of rank 0 is live, once."""
    return int(update == group == 0)


class Raising:
    """A strategy that raises on rank 1 from the third update on."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __call__(self, values, context):
        if RANK == 1 and context.update >= 2:
            raise ZeroDivisionError("no luck on this rank")
        return self.strategy(values, context)


def failing_in(hook, update):
    """A plugin whose hook raises on rank 1, from an update on."""

    def fail(context):
        if RANK == 1 and context.update >= update:
            raise ZeroDivisionError("no luck on this rank")

    return plugin_class(**{hook: fail})()


def without_memory(method, attempt):
    """An attempt in which a method of the buffer raises on rank 1."""

    def outcome_of_attempt():
        if RANK != 1:
            return attempt()
        with mock.patch.object(ReplayBuffer, method, side_effect=MemoryError(f"no memory to {method}")):
            return attempt()

    return outcome_of_attempt


def by_rank(groups, context):
    """A broken scorer: gives other scores on another rank."""
    return np.arange(len(groups), dtype=float) * (1 if RANK == 0 else -1) + 10


def drawing(rows, context):
    """A correction that draws as often as this rank has replayed rows."""
    context.rng.random(len(rows.advantages))
    return ratio(rows, context)


def cases(launched):
    folder = own(launched)
    for scope in ("process", "gathered"):
        for layout in LAYOUTS[WORLD]:
            yield f"{scope} {layout}", lambda s=scope, n=layout: trained(folder, n, replay_scope=s)
    if WORLD != 2:
        return
    for scope in ("process", "gathered"):
        yield (
            f"waiting {scope}",
            lambda s=scope: trained(folder, "whole", rare, {"max_steps": 12}, replay_scope=s, replay_buffer_size=64),
        )
    yield from comparable(folder, *LAYOUTS[2]["whole"])
    for name, rows in (("few groups", 8), ("groups enough", 16)):
        yield f"auto, {name}", lambda r=rows: chosen(folder, r)
    for scope in ("process", "gathered"):
        for rank in (0, 1):
            yield f"a rule of rank {rank}, {scope}", lambda s=scope, r=rank: of_other_rule(folder, s, r)
            yield f"resumed under a rule of rank {rank}, {scope}", lambda s=scope, r=rank: resumed(launched, s, r)
    yield from failing(folder)
    settings = {"replay_scope": "gathered", "replay_correction": drawing}
    yield "a correction that draws", lambda: trained(folder, "straddling", mixed, **settings)


class Another:
    """A reward function of the same name and rewards, and another source."""

    def __init__(self, first):
        self.first, self.__name__ = first, first.__name__

    def __call__(self, **given):
        return self.first(**given)


def put_another(trainer):
    trainer.reward_funcs[0] = Another(trainer.reward_funcs[0])


def of_other_rule(folder, scope, rank):
    """The reward function is another one on a rank after the third update."""
    trainer = build(folder, 8, 4, often, rank=RANK, max_steps=6)
    act = {3: lambda: put_another(trainer)} if rank == RANK else {}
    trainer.add_callback(Act(act))
    return {**run(trainer, replay_scope=scope, **{**REPLAY, "replay_buffer_size": 30}), **left(trainer)}


def resumed(folder, scope, rank):
    """The same, changed before training resumes, with groups of a file."""
    place = folder / f"{scope} {rank}"
    rows = [
        {"prompt": "1=", "completion": text, "reward": float(index), "group": group}
        for group in range(2)
        for index, text in enumerate("abcd")
    ]
    if RANK == 0:
        place.mkdir(parents=True)
        (place / "first.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.distributed.barrier()
    given = {**REPLAY, "replay_scope": scope, "replay_warm_start": str(place / "first.jsonl")}
    given |= {"replay_buffer_size": 30}
    settings = {"rank": RANK, "save_strategy": "steps", "save_steps": 2}
    run(build(place, 8, 4, often, max_steps=2, **settings), **given)
    trainer = build(place, 8, 4, often, max_steps=4, **settings)
    if rank == RANK:
        put_another(trainer)
    return {**run(trainer, resume=str(place / "checkpoint-2"), **given), **left(trainer)}


def left(trainer):
    """What has left, and what is there."""
    session = trainer.callback_handler.callbacks[-1].session
    table = session.buffer.table
    counted = session.totals.reasons[f"an entry left: {OTHER_RULE}"]
    return {
        "left": counted,
        "oldest": int(table.update[table.origin == 0].min()),
        "files": int((table.origin > 0).sum()),
    }


def chosen(folder, rows):
    """The scope that the default chooses for so many rows a process, in groups of 4."""
    trainer = build(folder, rows, 4, uneven, rank=RANK, max_steps=2)
    session = trl_replay.attach(trainer, replay_buffer_size=3)
    trainer.train()
    explained = session.explain()
    return {"scope": session.config.replay_scope, "capacity": session.buffer.capacity, "explained": explained}


def comparable(folder, rows, size):
    """Runs that any number of processes must do alike, at one global batch."""
    shared = {"replay_scope": "gathered", "replay_buffer_size": 4 // WORLD}
    for loss_type in LOSS_TYPES:
        settings = {"loss_type": loss_type, "max_steps": 6, "rank": RANK}
        settings["gradient_checkpointing"] = loss_type == "dapo"
        for name, limits in ((loss_type, {}), (f"limits {loss_type}", LIMITS)):
            yield (
                name,
                lambda s=settings, r={**shared, **limits}: run(
                    build(folder, rows, size, mixed, **s), compared=True, **r
                ),
            )


def failing(folder):
    def attempt(layout="whole", live=mixed, **settings):
        return lambda: trained(folder, layout, live, {"max_steps": 6}, **settings)

    yield "a scorer", attempt(live=often, replay_scope="gathered", replay_scorer=Raising(advantage_std))
    yield "a correction", attempt(live=often, replay_scope="process", replay_correction=Raising(ratio))
    for name, (hook, update, settings) in HOOKS.items():
        trl_replay.register(failing_in(hook, update), name.replace(" ", "_"))
        yield name, attempt(replay_plugins=[name.replace(" ", "_")], **settings)
    yield "a group that can't be loaded", without_memory("load", attempt(replay_scope="gathered"))
    yield "a group that can't be kept", without_memory("receive", attempt(replay_scope="gathered"))
    yield "a scorer that differs", attempt(live=uneven, replay_scope="gathered", replay_scorer=by_rank,
                                           replay_buffer_size=1)  # fmt: skip
