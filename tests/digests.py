"""Trains settings of the tests and prints digests of each run: weights, all else that a checkpoint has, and the log.

    python tests/digests.py            # all of them, a line each
    python tests/digests.py any ranks  # those whose names begin so

Run it before and after a change that must not change any number, and compare the lines: those of any settings, of runs
that a checkpoint must not change, and of such runs on two processes, by the digests of both.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1"
)

import contextlib
import hashlib
import io
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("helpers", "trainer")]
import resuming
import scenarios
import support
import test_any_settings as any_settings

import trl_replay
from trl_replay import reporting

TIMED = ("replay/seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
CONFIGURATIONS: dict[str, Any] = {
    **{f"any {number}": number for number in range(any_settings.RUNS)},
    **dict(resuming.runs()),
    **{f"ranks {name}": settings for name, settings in resuming.runs_on_ranks(2)},
}


def train(name: str, folder: Path) -> tuple[Any, Any]:
    """Trains one configuration; returns trainer and session."""
    if not name.startswith("any "):
        return resuming.train(folder, **{**CONFIGURATIONS[name], "save_strategy": "no"})
    number = CONFIGURATIONS[name]
    chosen = any_settings.settings_of(any_settings.covering(any_settings.AXES, any_settings.RUNS)[number])
    training, replay, _ = chosen
    scripts = any_settings.rewards_of(number, *chosen)
    rewards = [support.Rewards(*script, name=of) for script, of in zip(scripts, ("scripted", "other"), strict=False)]
    trainer = scenarios.made(folder, training, rewards)
    session = trl_replay.attach(trainer, **replay)
    trainer.train()
    return trainer, session


def digests(name: str, folder: Path) -> list[str]:
    """Those of a run in this process, without its output."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        reporting.is_logged = lambda *given: True  # the log has all metrics
        reporting.drop_zeros = lambda averaged: None
        trainer, session = train(name, folder)
        weights, state = support.weights_hash(trainer), resuming.state(session)
        log = [{key: entry[key] for key in entry if key not in TIMED} for entry in trainer.state.log_history]
    return [hashlib.sha256(repr(part).encode()).hexdigest()[:12] for part in (weights, state, log)]


def main(beginnings: list[str]) -> None:
    trl_replay.register(resuming.Curriculum(), "curriculum")
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(CONFIGURATIONS):
            if not name.startswith(tuple(beginnings or [""])):
                continue
            if name.startswith("ranks ") and "RANK" not in os.environ:
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
                done = subprocess.run([*launch, __file__, name], check=True, capture_output=True, text=True)
                print(*sorted(done.stdout.splitlines()), sep="\n", flush=True)
            else:
                found = digests(name, Path(folder, str(number)))
                line = f"{' '.join(found)}  {name} {os.environ.get('RANK', '')}\n"
                print(line, end="", flush=True)  # at once: two processes share the output
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
        os._exit(0)  # gloo's threads can abort an interpreter that is being torn down: pytorch/pytorch#179291


if __name__ == "__main__":
    main(sys.argv[1:])
