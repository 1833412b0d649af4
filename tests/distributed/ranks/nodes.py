"""One of two ranks on two machines, whose output folders lie on disks of their own, or on one that they share."""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from ending import end
from scripted import build, mixed

import trl_replay

RANK = int(os.environ["RANK"])
SCOPES = ("process", "gathered", "sharded")


def folders(root: Path) -> dict[str, list[str]]:
    """Per checkpoint, what of ours is in it."""
    return {
        path.name: sorted(part.name for part in (path / "trl_replay").glob("*"))
        for path in sorted(root.glob("checkpoint-*"))
    }


def train(root: Path, scope: str, resume: bool = False, **settings: Any) -> dict[str, Any]:
    """Trains for six updates, with a checkpoint after every second one."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "rank": RANK, **settings}
    trainer = build(root, 8, 4, mixed, **settings)
    session = trl_replay.attach(trainer, replay_scope=scope, replay_start=0, replay_buffer_size=8)
    last = trl_replay.last_complete_checkpoint(root) if resume else None
    trainer.train(resume_from_checkpoint=last)
    return {"folders": folders(root), "update": session.update, "resumed": last, "size": len(session.buffer)}


def cases(root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for scope in SCOPES:
        own = root / scope / f"node{RANK}"
        results[f"{scope}, first"] = train(own, scope)
        results[f"{scope}, again"] = train(own, scope)
        results[f"{scope}, rotated"] = train(own, scope, save_total_limit=1)
        kept = own / "checkpoint-best-6"
        shutil.copytree(own / "checkpoint-6" / "trl_replay", kept / "trl_replay")
        results[f"{scope}, kept"] = train(own, scope, save_total_limit=1)
        each = {"save_on_each_node": True, "save_total_limit": 1}
        own = root / scope / f"each{RANK}"
        results[f"{scope}, each"] = train(own, scope, **each)
        torch.distributed.barrier()
        for name in ("config.json", "model.safetensors"):  # which the trainer writes on the first machine only
            written = root / scope / "each0" / "checkpoint-6" / name
            if RANK == 1:
                shutil.copyfile(written, own / "checkpoint-6" / name)
        results[f"{scope}, each resumed"] = train(own, scope, resume=True, **{**each, "max_steps": 8})
        shared = root / scope / "shared"
        results[f"{scope}, shared"] = train(shared, scope, save_total_limit=1)
        results[f"{scope}, shared again"] = train(shared, scope, save_total_limit=2)
    return results


def main(root: Path) -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        results = cases(root)
    (root / f"results.{RANK}.json").write_text(json.dumps(results))
    end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
