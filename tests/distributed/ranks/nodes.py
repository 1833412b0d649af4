"""One of two ranks on two machines, whose output folders lie on disks of their own, or on one that they share."""

import os
import shutil
from functools import partial

import torch
from scripted import build, mixed

import trl_replay

RANK = int(os.environ["RANK"])
SCOPES = ("process", "gathered")


def folders(root):
    """Per checkpoint, what of ours is in it."""
    return {
        path.name: sorted(part.name for part in (path / "trl_replay").glob("*"))
        for path in sorted(root.glob("checkpoint-*"))
    }


def train(root, scope, resume=False, **settings):
    """Trains for six updates, with a checkpoint after every second one."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "rank": RANK, **settings}
    trainer = build(root, 8, 4, mixed, **settings)
    session = trl_replay.attach(trainer, replay_scope=scope, replay_start=0, replay_buffer_size=8)
    last = trl_replay.last_complete_checkpoint(root) if resume else None
    trainer.train(resume_from_checkpoint=last)
    return {"folders": folders(root), "update": session.update, "resumed": last, "size": len(session.buffer)}


def cases(root):
    for scope in SCOPES:
        own = root / scope / f"node{RANK}"
        yield f"{scope}, first", partial(train, own, scope)
        yield f"{scope}, again", partial(train, own, scope)
        yield f"{scope}, rotated", partial(train, own, scope, save_total_limit=1)
        shutil.copytree(own / "checkpoint-6" / "trl_replay", own / "checkpoint-best-6" / "trl_replay")
        yield f"{scope}, kept", partial(train, own, scope, save_total_limit=1)
        each = {"save_on_each_node": True, "save_total_limit": 1}
        own = root / scope / f"each{RANK}"
        yield f"{scope}, each", partial(train, own, scope, **each)
        torch.distributed.barrier()
        for name in ("config.json", "model.safetensors"):  # which the trainer writes on the first machine only
            written = root / scope / "each0" / "checkpoint-6" / name
            if RANK == 1:
                shutil.copyfile(written, own / "checkpoint-6" / name)
        yield f"{scope}, each resumed", partial(train, own, scope, resume=True, **{**each, "max_steps": 8})
        shared = root / scope / "shared"
        yield f"{scope}, shared", partial(train, shared, scope, save_total_limit=1)
        yield f"{scope}, shared again", partial(train, shared, scope, save_total_limit=2)
