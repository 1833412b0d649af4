"""Memory of a session, measured in a process that has done nothing else: `memory.py CASE FOLDER`."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def detaching(folder: Path) -> dict[str, Any]:
    """Attaches, trains and detaches six times."""
    trainer = make_trainer(folder, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    dead, sizes, groups = [], [], []
    for _ in range(6):
        with trl_replay.attached(trainer) as session:
            trainer.train()
            groups.append(len(session.buffer))
            dead += [weakref.ref(part) for part in (session, session.buffer, session.step.tap)]
        del session
        gc.collect()
        sizes.append(anonymous())
    return {"groups": groups, "alive": [type(part()).__name__ for part in dead if part()], "sizes": sizes}


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, written = sys.argv[1], Path(sys.argv[2])
    result = {"detaching": detaching}[case](written)
    (written / "result.json").write_text(json.dumps(result))
