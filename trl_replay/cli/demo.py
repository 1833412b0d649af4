"""`trl-replay demo`: a tiny training, with stock GRPO and with replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Command, positive


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=400, help="updates a run, each of 64 completions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of each arm a seed")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the picture and the figures")


def _demo(options: argparse.Namespace) -> int:
    from ..demo.show import show

    return show(options.steps, options.seeds, options.out)


DEMO = Command(
    "demo",
    "trains a tiny task with stock GRPO and with replay, side by side, in about 90 seconds on two cores",
    _add_options,
    _demo,
)
