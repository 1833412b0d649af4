"""Kills a run with SIGKILL at random moments, while a checkpoint is being written too, and resumes it each time.

    python benchmarks/kills.py --kills 50

Each resumed run starts from `trl_replay.last_whole_checkpoint`. In the end weights, buffer, generators and counters
are compared with those of a run that was never killed: nothing may be lost, no half-written checkpoint be taken.
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
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from resuming import differences, everything, train

import trl_replay

STATE = "trainer_state.json"


def child(folder: Path, updates: int) -> None:
    """Trains on from the newest whole checkpoint, in a process of its own; writes the outcome when it gets there."""
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.simplefilter("ignore")
    resume = trl_replay.last_whole_checkpoint(folder)
    found = train(folder, resume=resume, max_steps=updates, save_steps=1, save_total_limit=3)
    write(folder / "outcome.json", everything(*found))


def write(path: Path, outcome: dict[str, Any]) -> None:
    path.with_suffix(".part").write_text(json.dumps(outcome, default=str))
    path.with_suffix(".part").rename(path)


def fork(folder: Path, updates: int) -> int:
    """The id of a new process that runs `child`. Forked, so that it need not import everything again."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        child(folder, updates)
        status = 0
    except BaseException as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def writing(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any(not (path / STATE).exists() for path in folder.glob("checkpoint-*"))


def kill_once(folder: Path, updates: int, rng: random.Random, longest: float) -> str:
    """Runs, kills after a random time, half of the times in the middle of a checkpoint; returns where it hit."""
    process = fork(folder, updates)
    deadline = time.monotonic() + rng.uniform(0.05, longest)
    in_checkpoint = rng.random() < 0.5
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() >= deadline and (not in_checkpoint or writing(folder)):
            time.sleep(rng.uniform(0, 0.01) if in_checkpoint else 0)
            hit = "in a checkpoint" if writing(folder) else "elsewhere"
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return hit
        time.sleep(0.0005)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    return "finished"


def run(folder: Path, kills: int, seed: int, updates: int) -> dict[str, Any]:
    """Kills a run until it was hit `kills` times; a run that got to its end is started anew.

    Args:
        folder (`Path`): An empty folder.
        kills (`int`): How often at least.
        seed (`int`): Of the moments.
        updates (`int`): Length of the run.

    Returns:
        Where the kills hit, half-written checkpoints that were left, and whether the end is identical.
    """
    rng = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir(parents=True)
    started = time.monotonic()
    os.waitpid(fork(whole, updates), 0)
    seconds = time.monotonic() - started
    expected = json.loads((whole / "outcome.json").read_text())
    hits: list[str] = []
    half_written = runs = 0
    differing: list[str] = []
    while sum(hit != "finished" for hit in hits) < kills:
        shutil.rmtree(killed, ignore_errors=True)
        killed.mkdir()
        runs += 1
        while True:
            enough = sum(hit != "finished" for hit in hits) >= kills
            hits.append(kill_once(killed, updates, rng, 1e9 if enough else seconds / 2))
            if hits[-1] == "finished":
                break
            half_written += writing(killed)
        differing += differences(expected, json.loads((killed / "outcome.json").read_text()))
    counts = {place: hits.count(place) for place in ("in a checkpoint", "elsewhere")}
    return {
        "kills": sum(counts.values()),
        **counts,
        "half-written checkpoints left": half_written,
        "runs": runs,
        "identical": not differing,
        "differing": differing,
        "seconds": round(time.monotonic() - started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60, help="length of each run; each writes a checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.kills, options.seed, options.updates)
    print(json.dumps(outcome, indent=1))
    sys.exit(0 if outcome["identical"] else 1)


if __name__ == "__main__":
    main()
