"""`trl-replay estimate`: what replay could do for a run that was logged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.validation import unusable
from .command import Command
from .tables import make_console, make_table, printable

if TYPE_CHECKING:
    from ..extras.advice.logged import Bounds
    from ..extras.report.estimate import Estimate


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a run's output_dir, one of its checkpoints, or a file of its metrics"
    )
    parser.add_argument(
        "--num_generations", type=int, help="the trainer's, where no checkpoint with replay tells it; 8 if not given"
    )


def _run(options: argparse.Namespace) -> int:
    from ..extras.advice.rules import in_lines
    from ..extras.report.estimate import estimate

    size = options.num_generations
    if size is not None and size < 2:
        raise unusable("--num_generations", size, "give the trainer's, a number of at least 2")
    found = estimate(options.source, size)
    console = make_console()
    if found.outcome:
        console.print(f"outcome: {found.outcome}", markup=False, highlight=False)
    console.print(make_table(found.source, ("", "mean over logged steps"), _facts(found)))
    for line in [*_notes(found), *_pace(found), "", *in_lines(found.about, found.advice, found.outcome)]:
        console.print(printable(line), markup=False, highlight=False)
    return 0


def _facts(found: Estimate) -> list[tuple[str, str]]:
    """Return the figures of the whole run, each with its name."""
    return [
        ("dead groups", _percent(found.dead)),
        ("all wrong", _between(found.all_wrong)),
        ("all right", _between(found.all_right)),
        ("with a gradient", _live(1 - found.dead)),
    ]


def _live(share: float) -> str:
    """The share of live groups, as one in so many where they are few."""
    if share == 0:
        return "no group"
    if share > 0.5:
        return f"{_percent(share)} of the groups"
    many = 1 / share
    return f"1 group in {many:.3g}" if many < 100 else f"1 group in {many:,.0f}"


def _notes(found: Estimate) -> list[str]:
    """What the figures don't tell."""
    from ..extras.advice.logged import LITTLE_DEAD, SCALED_BY_BATCH

    if found.dry_run:
        return ["Replay counted in this run, and replaced nothing (replay_dry_run)."]
    if found.had_replay:
        return ["Replay was attached to this run already: `trl-replay report` shows what it did."]
    notes = [SCALED_BY_BATCH] if found.dead < LITTLE_DEAD else []
    if found.all_wrong is None:
        notes.append(
            "All wrong and all right are known only if rewards are 0 or 1 and every step is logged "
            "(logging_steps=1). A run with replay counts them."
        )
    elif found.all_wrong[0] != found.all_wrong[1]:
        notes.append("A log tells all wrong and all right as ranges. A run with replay counts them.")
    if found.advice and found.num_generations is None:
        notes.append("This assumes 8 completions per group. If yours differ, give --num_generations.")
    return notes


def _pace(found: Estimate) -> list[str]:
    """What further updates of a batch cost, where the log tells it."""
    from ..extras.advice.pace import in_words

    passes = found.generation_passes
    return [] if passes is None else [in_words(passes).capitalize() + "."]


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0.99 < share < 1 else f"{share:.0%}"


def _between(bounds: Bounds | None) -> str:
    """A share, or between which two it lies."""
    if bounds is None:
        return "not known"
    least, greatest = map(_percent, bounds)
    return least if least == greatest else f"{least} to {greatest}"


ESTIMATE = Command(
    "estimate", "what replay could do for a logged run of GRPO, with or without replay", _add_options, _run
)
