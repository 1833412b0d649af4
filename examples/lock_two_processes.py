"""The combination lock on two processes that share a replay buffer, or don't.

    torchrun --nproc_per_node 2 examples/lock_two_processes.py --scope gathered
    accelerate launch --multi_gpu --num_processes 2 examples/lock_two_processes.py --scope sharded
    python examples/lock_two_processes.py            # one process, the same 64 completions an update

An update has 8 groups of 8 completions over all processes, and all processes together keep 64 groups, so that the
curves can be compared (benchmarks/scopes_learning.py does). Nothing in here depends on the number of processes but the
size of the buffer: the launcher sets up the processes, and replay_scope says who shares what. (The lock trains on the
CPU whatever there is. `accelerate launch --cpu` starts one process only; with `--multi_gpu` it starts as many as
asked.)
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import warnings
from itertools import product
from pathlib import Path

import combination_lock as lock
import torch
from combination_lock import Record

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GROUPS_KEPT = 64


def settings(scope: str) -> dict[str, str | int]:
    """The same number of groups in all: `replay_buffer_size` counts per process but in the one buffer of gathered."""
    return {"replay_scope": scope, "replay_buffer_size": GROUPS_KEPT // (1 if scope == "gathered" else WORLD)}


def show(record: Record) -> None:
    if RANK == 0:
        print(
            f"step {len(record.reward):5}   reward {record.final(50):.3f}   dead groups {record.dead[-1]:.0%}, "
            f"after replay {record.dead_after[-1]:.0%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", default="gathered", help="process, gathered, sharded; several with commas")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0", help="one run each, separated by commas")
    parser.add_argument("--json", type=Path, help="append the runs' records to this file, one a line")
    options = parser.parse_args()
    rate = lock.LEARNING_RATES["replay"]
    for scope, seed in product(options.scope.split(","), map(int, options.seeds.split(","))):
        record = lock.run(scope, seed, rate, options.steps, settings(scope), show)
        if RANK == 0:
            print(f"{scope} on {WORLD} processes, seed {seed}, {record.seconds:.0f} s\n{record.explanation}")
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"processes": WORLD, **record.as_dict()}) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads can abort a process whose interpreter is being torn down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
