"""The demo's runs: one arm on all processes that were launched, or both next to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ..errors import ReplayError
from . import lock
from .lock import Record

LABELS = {"stock": "stock GRPO", "replay": "with replay"}
"""Names of the arms."""


def run_arm(arm: str, scope: str, seeds: Sequence[int], steps: int, path: Path) -> list[Record]:
    """Train one arm on every seed, on all processes, and append the records to a file, one a line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    settings: dict[str, Any] = {"replay_scope": scope, "replay_buffer_size": lock.GROUPS_KEPT // lock.WORLD}
    records = []
    for seed in seeds:
        if lock.RANK == 0:
            print(f"{LABELS[arm]}, seed {seed}: teaching the model to answer at random", file=sys.stderr)
        rate, told = lock.LEARNING_RATES[arm], progress if lock.RANK == 0 else None
        record = lock.run(arm, seed, rate, steps, None if arm == "stock" else settings, told)
        records.append(record)
        if lock.RANK == 0:
            with path.open("a") as file:
                file.write(json.dumps({"processes": lock.WORLD, "scope": scope, **asdict(record)}) + "\n")
    return records


def progress(record: Record) -> None:
    """Print a line on the last ten updates."""
    dead, after = np.mean(record.dead[-10:]), np.mean(record.dead_after[-10:])
    print(
        f"{LABELS[record.arm]}, seed {record.seed}, update {len(record.reward)}: {record.final(10):.0%} right, dead "
        f"groups {dead:.0%} → {after:.0%}",
        file=sys.stderr,
    )


def run_both(seeds: Sequence[int], steps: int, out: Path) -> list[Record]:
    """Train with replay here, and stock in a process next to it.

    Raises:
        ReplayError: Stock ended with an error.
    """
    options = ["--steps", str(steps), "--seeds", *map(str, seeds), "--out", str(out)]
    stock = subprocess.Popen([sys.executable, "-m", "trl_replay", "demo", "--arm", "stock", *options])
    try:
        replay = run_arm("replay", "auto", seeds, steps, out / "replay.jsonl")
    except BaseException:
        stock.kill()
        raise
    if stock.wait():
        raise ReplayError("Stock GRPO ended with an error, see above.")
    lines = [json.loads(line) for line in (out / "stock.jsonl").read_text().splitlines()]
    return [Record(**{name: line[name] for name in Record.__slots__}) for line in lines] + replay


def leave() -> None:
    """End this process, if it was launched with others."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads can abort a process whose interpreter is being torn down (pytorch/pytorch#179291)
