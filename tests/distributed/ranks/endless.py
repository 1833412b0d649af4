"""One rank of two that train without end; rank 1 kills itself, soon after it has replayed.

It writes the file `replaying.RANK` once it has replayed.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from scripted import build, mixed
from transformers import TrainerCallback

import trl_replay


class Marker(TrainerCallback):
    def __init__(self, session: Any, path: Path) -> None:
        self.session, self.path = session, path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.totals.counters["replaced"] and not self.path.exists():
            self.path.touch()
            if self.path.suffix == ".1":  # at any moment of the next updates
                threading.Timer(random.uniform(0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer = build(folder / f"trainer{rank}", 6, 4, mixed, rank=rank, max_steps=100_000, ddp_timeout=20)
    session = trl_replay.attach(trainer, replay_scope="sharded", replay_buffer_size=3)
    trainer.add_callback(Marker(session, folder / f"replaying.{rank}"))
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
