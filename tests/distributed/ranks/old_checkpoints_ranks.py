"""One rank of the launch of tests/distributed/test_old_checkpoints_ranks.py; what it found as JSON in a folder."""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import io
import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from ending import end
from old_checkpoints import SETTINGS, SHARDED, Written, build, check_session
from resuming import group_hash, stopped_after_loading, train

RANK = int(os.environ["RANK"])


def main(folder: Path) -> None:
    checkpoint = str(folder / SHARDED.name)
    settings = {**SETTINGS, "replay_scope": "sharded"}
    trainer = build(folder, per_device_train_batch_size=6)
    with stopped_after_loading(trainer, checkpoint, **settings) as session:
        check_session(session, Written(SHARDED, RANK))
    trainer = build(folder, per_device_train_batch_size=6)
    _, session = train(folder, trainer=trainer, resume=checkpoint, **settings)
    held = {serial: group_hash(session.buffer.load(serial)) for serial in session.buffer.held()}
    found = {
        "update": session.update,
        "serials": session.buffer.table.serial.tolist(),
        "owners": session.buffer.table.owner.tolist(),
        "held": held,
        "replaced": session.totals.counters["replaced"],
        "drifts": session.buffer.table.drift.tolist(),
    }
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        main(Path(sys.argv[1]))
    end()
