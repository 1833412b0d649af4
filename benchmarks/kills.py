"""Kills a run with SIGKILL at random moments, while a checkpoint is being written too, and resumes it each time.

    python benchmarks/kills.py --kills 50
    python benchmarks/kills.py --kills 20 --processes 2 --scope gathered

Each resumed run starts from `trl_replay.last_complete_checkpoint`. In the end weights, buffer, generators and counters
are compared with those of a run that was never killed: nothing may be lost, no half-written checkpoint be taken. With
several processes all are killed at once, each wherever it is.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from resuming import SCOPES, differences, everything, train

import trl_replay

STATE = "trainer_state.json"


class Run(NamedTuple):
    """A run that is killed: so many updates, each with a checkpoint, on so many processes."""

    updates: int
    processes: int
    scope: str


def progress_bars(kind: Any) -> list[Any]:
    """The class and all that derive from it: each may have a lock of its own."""
    return sum(map(progress_bars, kind.__subclasses__()), [kind])


def child(folder: Path, kind: Run, rank: int) -> None:
    """Trains on from the newest whole checkpoint, in a process of its own; writes the outcome when it gets there."""
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for bar in progress_bars(tqdm):
        bar.set_lock(threading.RLock())  # the one before is shared with processes that are killed while they hold it
    warnings.simplefilter("ignore")
    resume = trl_replay.last_complete_checkpoint(folder)
    settings = {"max_steps": kind.updates, "save_steps": 1, "save_total_limit": 3, "replay_scope": kind.scope}
    found = train(folder, resume=resume, **settings)
    write(folder / f"outcome-{rank}.json", everything(*found))


def write(path: Path, outcome: dict[str, Any]) -> None:
    path.with_suffix(".part").write_text(json.dumps(outcome, default=str))
    path.with_suffix(".part").rename(path)


def start(folder: Path, kind: Run) -> list[int]:
    """The ids of new processes that run `child`. Forked, so that they need not import everything again."""
    sys.stdout.flush()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ids = []
    for rank in range(kind.processes):
        process = os.fork()
        if process:
            ids.append(process)
            continue
        status = 1
        try:
            if kind.processes > 1:
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": kind.processes, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
            child(folder, kind, rank)
            status = 0
        except BaseException as error:
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return ids


def writing(folder: Path) -> bool:
    """Tells whether a checkpoint is being written."""
    return any(not (path / STATE).exists() for path in folder.glob("checkpoint-*"))


def kill_once(folder: Path, kind: Run, rng: random.Random, longest: float) -> str:
    """Runs, kills after a random time, half of the times in the middle of a checkpoint; returns where it hit."""
    running = start(folder, kind)
    deadline = time.monotonic() + rng.uniform(0.05, longest)
    in_checkpoint = rng.random() < 0.5
    while running := [process for process in running if os.waitpid(process, os.WNOHANG) == (0, 0)]:
        failed = (folder / "error.txt").exists()
        if failed or (time.monotonic() >= deadline and (not in_checkpoint or writing(folder))):
            time.sleep(rng.uniform(0, 0.01) if in_checkpoint else 0)
            hit = "in a checkpoint" if writing(folder) else "elsewhere"
            for process in running:
                os.kill(process, signal.SIGKILL)
            for process in running:
                os.waitpid(process, 0)
            assert not failed, (folder / "error.txt").read_text()
            (folder / "error.txt").unlink(missing_ok=True)  # one may have seen another die before it did
            return hit
        time.sleep(0.0005)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    return "finished"


def outcomes(folder: Path, kind: Run) -> list[dict[str, Any]]:
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(kind.processes)]


def run(folder: Path, kills: int, seed: int, kind: Run) -> dict[str, Any]:
    """Kills a run until it was hit `kills` times; a run that got to its end is started anew.

    Args:
        folder (`Path`): An empty folder.
        kills (`int`): How often at least.
        seed (`int`): Of the moments.
        kind (`Run`): What to kill.

    Returns:
        Where the kills hit, half-written checkpoints that were left, and whether the end is identical.
    """
    rng = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir(parents=True)
    started = time.monotonic()
    assert kill_once(whole, kind, rng, longest=1e9) == "finished"
    seconds = time.monotonic() - started
    expected = outcomes(whole, kind)
    hits: list[str] = []
    half_written = 0
    differing: list[str] = []
    while sum(hit != "finished" for hit in hits) < kills:
        shutil.rmtree(killed, ignore_errors=True)
        killed.mkdir()
        while True:
            enough = sum(hit != "finished" for hit in hits) >= kills
            hits.append(kill_once(killed, kind, rng, 1e9 if enough else seconds / 2))
            if hits[-1] == "finished":
                break
            half_written += writing(killed)
        for one, other in zip(expected, outcomes(killed, kind), strict=True):
            differing += differences(one, other)
    counts = {place: hits.count(place) for place in ("in a checkpoint", "elsewhere")}
    return {
        "kills": sum(counts.values()),
        **counts,
        "half-written checkpoints left": half_written,
        "identical": not differing,
        "differing": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60, help="length of each run; each writes a checkpoint")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--scope", choices=SCOPES, default="process")
    options = parser.parse_args()
    kind = Run(options.updates, options.processes, options.scope)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.kills, options.seed, kind)
    print(json.dumps(outcome, indent=1))
    sys.exit(0 if outcome["identical"] else 1)


if __name__ == "__main__":
    main()
