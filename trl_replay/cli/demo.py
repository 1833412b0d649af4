"""`trl-replay demo`: a tiny model on a task of sparse rewards, stock and with replay."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ..base.validation import unusable
from ..errors import ReplayError
from .tables import Command

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Settings, where it has none: before torch and TRL are imported."""
INTRODUCTION = """\
A combination lock: 8 keys, each opened by one of 256 codes. The model begins with random codes, so nearly every group
of 8 answers is all wrong and has no gradient. A tiny model trains with stock GRPO and with replay, next to each other,
in one to four minutes.
"""
REMARK = """
One lock shows a difference and does not measure it, and this toy task was made for replay. Whether replay would help
your run: trl-replay report OUTPUT_DIR"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="updates of a run, each of 64 completions")
    parser.add_argument("--seed", type=int, default=0, help="of the lock")
    parser.add_argument("--out", type=Path, default=Path("trl-replay-demo"), help="folder of logs and page")
    parser.add_argument("--arm", choices=("stock", "replay"), help=argparse.SUPPRESS)


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise unusable("--steps", options.steps, "give a number of at least 1")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from ..demo import GENERATIONS, GROUPS, train
    from .runs import report

    if options.arm:
        train(options.arm, options.seed, options.steps, options.out)
        return 0
    print(INTRODUCTION, flush=True)
    given = [f"--{name}={getattr(options, name)}" for name in ("steps", "seed", "out")]
    stock = subprocess.Popen([sys.executable, "-m", "trl_replay", "demo", "--arm=stock", *given])
    try:
        train("replay", options.seed, options.steps, options.out)
        if stock.wait():
            raise ReplayError("Stock GRPO ended with an error, which stands above.")
    finally:
        stock.kill()
    arms = [str(options.out / arm) for arm in ("stock", "replay")]
    report(arms, per_batch=GROUPS * GENERATIONS, page=options.out / "report.html")
    print(REMARK)
    return 0


DEMO = Command(
    "demo", "trains a tiny model with stock GRPO and with replay, in one to four minutes", _add_options, _run
)
