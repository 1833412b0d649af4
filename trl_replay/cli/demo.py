"""`trl-replay demo`: a tiny model on a task of sparse rewards, stock and with replay."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..base.validation import unusable
from .command import Command
from .tables import make_console

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Of the environment, where it has none: before torch and TRL are imported."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="updates of a run, each of 64 completions; 300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run of each arm for every seed; 0 alone")
    parser.add_argument(
        "--out", type=Path, default=Path("trl-replay-demo"), help="folder of picture and records; trl-replay-demo"
    )
    parser.add_argument(
        "--arm", choices=("stock", "replay"), help="trains this arm alone, on all processes that were launched"
    )
    parser.add_argument("--scope", default="auto", help="replay_scope, for several processes")


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise unusable("--steps", options.steps, "give a number of at least 1")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from ..demo import arms, showing

    options.out.mkdir(parents=True, exist_ok=True)
    if options.arm:
        path = options.out / f"{options.arm}.jsonl"
        arms.run_arm(options.arm, options.scope, options.seeds, options.steps, path)
        arms.leave()
        return 0
    print(showing.INTRODUCTION, flush=True)
    for arm in arms.LABELS:
        (options.out / f"{arm}.jsonl").unlink(missing_ok=True)
    records = arms.run_both(options.seeds, options.steps, options.out)
    print(f"\n{showing.outcome(records)}\n")
    make_console().print(showing.table(records))
    print(f"{showing.REMARK}\n{showing.draw(records, options.out / 'demo.png')}")
    return 0


DEMO = Command("demo", "trains a tiny model with stock GRPO and with replay, in about a minute", _add_options, _run)
