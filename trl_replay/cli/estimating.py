"""`trl-replay estimate`: what replay could do for a run that was logged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.validation import unusable
from .command import Command
from .tables import make_console, make_table

if TYPE_CHECKING:
    from ..advice.logged import Bounds
    from ..report.estimate import Estimate


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a run's output_dir, one of its checkpoints, or a file of its metrics"
    )
    parser.add_argument(
        "--num_generations", type=int, help="the trainer's, where no checkpoint with replay tells it; 8 if not given"
    )


def _run(options: argparse.Namespace) -> int:
    from ..advice.logged import SCALED_BY_BATCH
    from ..report.estimate import estimate

    size = options.num_generations
    if size is not None and size < 2:
        raise unusable("--num_generations", size, "give the trainer's, a number of at least 2")
    found = estimate(options.source, size)
    console = make_console()
    console.print(make_table(found.source, ("", "mean over logged steps"), _facts(found)))
    if found.dry_run:
        console.print("Replay counted in this run, and replaced nothing (replay_dry_run).")
    elif found.had_replay:
        console.print("Replay was attached to this run already: `trl-replay report` shows what it did.")
    else:
        console.print(
            "All wrong and all right: told where rewards were 0 and 1 alone and each step was logged "
            "(logging_steps=1). A run with replay counts them."
        )
        console.print(SCALED_BY_BATCH, markup=False)
    if found.advice and found.num_generations is None:
        console.print("Groups are taken for 8 completions each: if they have others, give --num_generations.")
    console.print(
        f"\nWhat to change, by the {found.about}:" if found.advice else f"\nNo advice: {found.about}.", markup=False
    )
    for seen, change, evidence in found.advice:
        console.print(f"- {seen}: {change}\n  {evidence}", markup=False)
    return 0


def _facts(found: Estimate) -> list[tuple[str, str]]:
    """Return the figures of the whole run, each with its name."""
    bound = "none: every group was dead" if found.bound is None else f"{found.bound:.2f} times the live groups a batch"
    return [
        ("dead groups", _percent(found.dead)),
        ("all wrong", _between(found.all_wrong)),
        ("all right", _between(found.all_right)),
        ("most that filling them gives", bound),
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0.99 < share < 1 else f"{share:.0%}"


def _between(bounds: Bounds | None) -> str:
    """A share, or between which two it lies."""
    if bounds is None:
        return "not told"
    least, greatest = map(_percent, bounds)
    return least if least == greatest else f"{least} to {greatest}"


ESTIMATE = Command(
    "estimate", "what replay could do for a logged run of GRPO, with or without replay", _add_options, _run
)
