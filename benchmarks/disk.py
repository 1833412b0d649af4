"""Fills a buffer whose payload is on disk, draws from it, and measures the growth of anonymous memory (RssAnon).

    python benchmarks/disk.py FOLDER --groups 100000

Mapped file pages do not count: the system takes them back when it needs them. A group is 8 completions of 256 tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_replay import Group
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.strategies.disk import DiskStorage

ROWS, PROMPT, TOKENS = 8, 64, 256


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def make_group(generator: torch.Generator) -> Group:
    count = ROWS * TOKENS
    tensors = {
        "prompt_ids": torch.randint(0, 50_000, (PROMPT,), generator=generator, dtype=torch.int32),
        "completion_ids": torch.randint(0, 50_000, (count,), generator=generator, dtype=torch.int32),
        "old_per_token_logps": torch.rand(count, generator=generator) - 3,
        "advantages": torch.rand(ROWS, generator=generator),
    }
    keys = frozenset({*tensors, "prompt_mask", "completion_mask"})
    return Group(tensors, keys, np.array([PROMPT]), np.full(ROWS, TOKENS))


def run(folder: Path, groups: int, draws: int = 2000) -> dict[str, Any]:
    """Offers a tenth more groups than the buffer holds, so that some are evicted, and then draws.

    Args:
        folder (`Path`): On the disk to be measured.
        groups (`int`): Capacity.
        draws (`int`, *optional*, defaults to `2000`): Groups read at random.
    """
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    offered = groups + groups // 10
    group = make_group(generator)
    DiskStorage(folder).put(0, group)
    gc.collect()
    before, started = anonymous(), time.perf_counter()
    buffer = ReplayBuffer(groups, DiskStorage(folder), Limits())
    peak = before
    for serial in range(offered):
        columns = {"serial": np.array([serial]), "score": rng.random(1), "nbytes": np.array([group.nbytes])}
        stored, _ = buffer.offer(columns, lambda table: table.score, rng)
        buffer.receive(dict.fromkeys(stored, make_group(generator)))
        if serial % 1000 == 0:
            peak = max(peak, anonymous())
    filled = time.perf_counter()
    for serial in rng.choice(buffer.table.serial, draws):
        buffer.load(int(serial))
    drawn = time.perf_counter()
    gc.collect()
    return {
        "groups": len(buffer),
        "bytes of files": buffer.storage.nbytes,
        "growth of anonymous memory": max(peak, anonymous()) - before,
        "milliseconds to store a group": round(1e3 * (filled - started) / offered, 3),
        "milliseconds to read a group": round(1e3 * (drawn - filled) / draws, 3),
        "files left": sum(1 for _ in buffer.storage.folder.rglob("*.safetensors")),  # type: ignore[attr-defined]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", type=int, default=100_000)
    options = parser.parse_args()
    print(json.dumps(run(options.folder, options.groups), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
