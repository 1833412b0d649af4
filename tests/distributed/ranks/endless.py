"""One rank of two that train until they are killed; writes the file `replaying.RANK` once it has replayed."""

from __future__ import annotations

import gc
import os

gc.disable()  # importing leaves little garbage, and looking for it takes more than a second
os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import sys
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
        if self.session.totals.counters["replaced"]:
            self.path.touch()


def main(folder: Path) -> None:
    gc.enable()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer = build(folder / f"trainer{rank}", 6, 4, mixed, rank=rank, max_steps=100_000, ddp_timeout=20)
    session = trl_replay.attach(trainer, replay_scope="sharded", replay_buffer_size=3)
    trainer.add_callback(Marker(session, folder / f"replaying.{rank}"))
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
