"""Every evictor × sampler × scope × layout: a run that resumes ends bit for bit as the one that never stopped.

    python benchmarks/resume.py
    torchrun --nproc_per_node 2 benchmarks/resume.py

tests/checkpoint/test_session_state.py has the pairwise selection.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import io
import itertools
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from accelerate.utils import broadcast_object_list
from resuming import EVICTORS, LAYOUTS, SAMPLERS, SCOPES, build, differences, everything, train


def main() -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", "0"))
    differing, replaced, count = [], 0, 0
    root = [tempfile.mkdtemp() if rank == 0 else ""]
    if "RANK" in os.environ:
        build(Path(tempfile.mkdtemp()))  # starts the process group
        broadcast_object_list(root)
    folder = Path(root[0])
    for evictor, sampler, scope, layout in itertools.product(EVICTORS, SAMPLERS, SCOPES, LAYOUTS):
        settings = {"replay_evictor": evictor, "replay_sampler": sampler, "replay_scope": scope, **LAYOUTS[layout]}
        run = folder / str(count)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            whole = everything(*train(run, **settings))
            resumed = everything(*train(run, resume=str(run / "checkpoint-6"), **settings))
        found = differences(whole, resumed)
        differing += [(evictor, sampler, scope, layout, found)] if found else []
        replaced += whole["totals"][1]["replaced"] > 0
        count += 1
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(run)
    print(json.dumps({"rank": rank, "cases": count, "of them with replay": replaced, "differing": differing}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
