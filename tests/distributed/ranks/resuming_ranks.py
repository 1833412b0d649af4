"""One rank of a launch of tests/distributed/test_checkpoint_ranks.py: every case in turn, results as JSON."""

import os
import shutil
from functools import partial
from pathlib import Path

import torch
from resuming import PROMPTS, SCOPES, build, group_hash, interrupted, restored, runs_on_ranks, train
from support import plugin_class, weights_hash
from teacher import rows_of

import trl_replay
from trl_replay.data.types import Group

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def identical(folder, **settings):
    """In which respects a run that resumes from the fourth of six updates differs from the one that wrote it."""
    whole, differences = interrupted(folder, at=4, **{**settings, "max_steps": 6})
    return {"differences": differences, "replaced": whole["totals"][1]["replaced"]}


def stocks(folder):
    """The same of stock: three processes add gradients in an order that depends on how long DDP has been running."""
    weights = []
    for resume in (None, str(folder / "checkpoint-4")):
        trainer = build(folder, max_steps=8, save_steps=4)
        trainer.train(resume_from_checkpoint=resume)
        weights.append(weights_hash(trainer))
    return {"same": weights[0] == weights[1]}


def dealt(folder, checkpoint, **settings):
    """This rank's part of a checkpoint of another number of ranks; training goes on."""
    found = restored(folder, str(checkpoint), replay_buffer_size=50, **settings)
    _, session = train(
        folder, resume=str(checkpoint), replay_buffer_size=50, **{**settings, "max_steps": 6, "save_strategy": "no"}
    )
    table = {name: found["columns"][name] for name in ("serial", "owner", "update", "score")}
    return {
        "columns": table,
        "payload": found["payload"],
        "update": session.update,
        "together": dict(session.totals.of_all_ranks),
    }


def refused(folder):
    """One rank's file is damaged, and all ranks must say so together."""
    train(folder, max_steps=2, save_steps=2)
    checkpoint = folder / "checkpoint-2"
    if RANK == 1:
        path = checkpoint / "trl_replay" / "rank-00001" / "state.json"
        path.write_text(path.read_text().replace('"rank": 1', '"rank": 2'))
    torch.distributed.barrier()
    train(folder, resume=str(checkpoint), max_steps=3, save_strategy="no")


def mixed(folder):
    """One rank's files are those of another run, which differs in nothing but its seed."""
    for seed in (1, 2):
        train(folder / str(seed), max_steps=2, save_steps=2, seed=seed)
    ours = folder / "1" / "checkpoint-2" / "trl_replay" / "rank-00001"
    if RANK == 1:
        shutil.rmtree(ours)
        shutil.copytree(folder / "2" / "checkpoint-2" / "trl_replay" / "rank-00001", ours)
    torch.distributed.barrier()
    train(folder / "1", resume=str(folder / "1" / "checkpoint-2"), max_steps=3, save_strategy="no", seed=1)


class Versioned:
    """An evictor that can't take back its state on rank 1."""

    def __init__(self):
        self.loaded = 0

    def __call__(self, table, context):
        return table.serial

    def state_dict(self):
        return {"loaded": self.loaded}

    def load_state_dict(self, state):
        fails = RANK == 1 and self.loaded == state["loaded"] - 1
        self.loaded = state["loaded"]
        if fails:
            raise ValueError("not on this rank")


def unapplied(folder, scope):
    """One rank can't apply what it read: all raise."""
    before = Versioned()
    before.loaded = 1
    settings = {"replay_scope": scope, "max_steps": 4, "save_steps": 2}
    train(folder, replay_evictor=before, **settings)
    train(folder, replay_evictor=Versioned(), **settings, resume=str(folder / "checkpoint-2"))


def unsaved(folder):
    """A plugin fails to save on one rank."""

    def save(session, directory):
        if RANK == 1:
            raise OSError("no room")

    trl_replay.register(plugin_class(save=save)(), "unlucky")
    train(folder, replay_plugins="unlucky", max_steps=2, save_steps=2)


def kept(folder):
    """Metrics fail on one rank."""

    def metrics(context):
        if RANK == 1 and context.update == 2:
            raise ValueError("no metric on this rank")
        return {}

    trl_replay.register(plugin_class(metrics=metrics)(), "failing")
    train(folder, replay_plugins="failing", max_steps=4, save_steps=1)


def positions(folder):
    """Where this rank is in the order of prompts, at a checkpoint and when it resumes with batches of another size."""
    settings = {"replay_refill": "new(rounds=2)", "prompts": PROMPTS[:24], "replay_scope": "process"}
    _, session = train(folder, **settings, max_steps=2, save_steps=2)
    found = restored(folder, str(folder / "checkpoint-2"), **settings, per_device_train_batch_size=8)
    return {"then": session.step.rounds.state_dict()["source"], "now": found["rounds"]["source"]}


TEACHER = [row for prompt in ("1+1=", "3-1=", "2*1=") for row in rows_of(prompt, list("2345"), [1, 0, 0, 0])]


def files(folder, scope):
    """This rank's export, what all ranks make of the files together, and of groups without log-probs."""
    _, session = train(folder, replay_scope=scope, replay_buffer_size=50, max_steps=4, save_strategy="no")
    path = session.export(folder / f"{scope}.parquet")
    torch.distributed.barrier()
    trainer = build(folder, max_steps=4, save_strategy="no")
    other = trl_replay.attach(trainer, replay_scope=scope, replay_buffer_size=50)
    added = [other.add(part) for part in sorted(folder.glob(f"{scope}*.parquet"))]
    taken = hashes(other)
    other.buffer.clear()
    added.append(other.add(TEACHER))
    trainer.train()
    return {
        "path": path.name,
        "held": hashes(session),
        "added": added,
        "taken": taken,
        "taught": {s: group_hash(other.buffer.load(s)) for s in taught(other) if s in other.buffer.held()},
        "table": other.buffer.table.serial[other.buffer.table.origin == 2].tolist(),
        "replaced": other.totals.counters["replaced"],
    }


def scored(folder):
    """What this rank computed for seven groups without rewards, and what its buffer has."""
    trainer = build(folder, max_steps=1, save_strategy="no")
    seen = []

    def graded(prompts, completions, **_):
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        seen.extend(texts)
        return [int(text[-1]) / int(text[0]) for text in texts]

    trainer.reward_funcs, trainer.reward_func_names = [graded], ["graded"]
    session = trl_replay.attach(trainer, replay_scope="gathered")
    session.add([{"prompt": f"{n}=", "completion": text} for n in range(1, 8) for text in "2345"], rescore=True)
    return {"seen": seen, "rewards": session.buffer.table.row_reward.tolist()}


def taught(session):
    table = session.buffer.table
    return [int(serial) for serial in table.serial[table.origin == 2]]


def hashes(session):
    """Of what this rank holds, as groups that know nothing of tools."""
    groups = [session.buffer.load(serial) for serial in session.buffer.held()]
    plain = [Group(g.tensors, g.keys - {"tool_mask"}, g.prompt_lengths, g.completion_lengths) for g in groups]
    return [group_hash(group) for group in plain]


def cases(_, shared):
    """Of each number of processes; each leaves checkpoints for the next."""
    folder = Path(shared)
    yield "stock", partial(stocks, folder / "stock")
    for name, settings in runs_on_ranks(WORLD):
        yield name, partial(identical, folder / name, **settings)
    for scope in SCOPES:
        for source in (1, 3) if WORLD == 2 else (1,):
            checkpoint = folder / f"{scope} of {source}" / "checkpoint-4"
            yield f"{scope} of {source}", partial(dealt, folder / "dealt", checkpoint, replay_scope=scope)
        if WORLD == 2:  # two groups a process: "auto" would be gathered
            yield f"auto, {scope} of 1", partial(dealt, folder / "dealt", folder / f"{scope} of 1" / "checkpoint-4")
        train(folder / f"{scope} of {WORLD}", replay_scope=scope, replay_buffer_size=50, max_steps=4, save_steps=4)
    if WORLD == 2:
        for scope in SCOPES:
            yield f"files {scope}", partial(files, folder / "files", scope)
        yield "scored", lambda: scored(folder / "scored")
        yield "refused", lambda: refused(folder / "refused")
        yield "mixed", lambda: mixed(folder / "mixed")
        for scope in SCOPES:
            yield f"unapplied, {scope}", partial(unapplied, folder / f"unapplied {scope}", scope)
        yield "positions", lambda: positions(folder / "positions")
        yield "unsaved", lambda: unsaved(folder / "unsaved")
        yield "kept", lambda: kept(folder / "kept")
