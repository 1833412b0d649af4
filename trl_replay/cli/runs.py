"""`trl-replay report` and `export`: what reads the files of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..base.validation import unusable
from .tables import Command, make_console, make_table, printable

MOST_SIDE_BY_SIDE = 4
"""Runs that have a column each; of more, each has a row."""


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="folder of a checkpoint, …/checkpoint-12, or of a run: its newest whole one"
    )
    parser.add_argument("out", type=Path, help="file to write: out.parquet")


def _export(options: argparse.Namespace) -> int:
    from ..extras.files.export import checkpoint_of, of_checkpoint, write

    count = write(options.out, of_checkpoint(checkpoint_of(options.checkpoint)))
    print(f"written: {options.out}, {count} completions")
    return 0


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="run",
        help="the trainer's output_dir, one of its checkpoints, or a table of its metrics by step (.csv, .jsonl, "
        ".json, .parquet); several are compared with the first, as label=folder where a label names their settings",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page, with charts")
    parser.add_argument(
        "--reward", metavar="NAME", help="the reward function that counts, as in rewards/NAME/mean; else the sum"
    )
    parser.add_argument("--completions", type=int, help="of a generation batch, where the log does not count them")


def _report(options: argparse.Namespace) -> int:
    if options.completions is not None and options.completions < 1:
        raise unusable("--completions", options.completions, "give a number of at least 1")
    report(options.runs, options.reward, options.completions, options.html)
    return 0


def report(
    given: Sequence[str], reward: str | None = None, per_batch: int | None = None, page: Path | None = None
) -> None:
    """Print what one run came to and what to change in it, or how several differ; and write it as a page.

    Args:
        given (`Sequence[str]`): Where the runs are, with labels or without.
        reward (`str`, *optional*): The reward function that counts.
        per_batch (`int`, *optional*): Completions of a generation batch.
        page (`Path`, *optional*): Where to write the page.

    Raises:
        ReplayError: A run can't be read, or has no such reward.
    """
    from ..extras.outcome.advice import what_to_change
    from ..extras.outcome.comparison import compare, outcomes_of
    from ..extras.outcome.outcome import cost_in_words
    from ..extras.outcome.page import write_page
    from ..extras.outcome.run import Run

    runs = [Run.of_folder(one, per_batch) for one in given]
    first, *others = outcomes = outcomes_of(runs, reward)
    above, below = compare(outcomes), list[str]()
    if not others:
        alarms, change = what_to_change(first)
        above, below = [f"outcome: {first}"], [*cost_in_words(first.run), *alarms.values(), change]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.facts)
    head = ("over the whole run", *(run.label + run.seed for run in runs))
    facts = [(name, *(outcome.facts.get(name, "–") for outcome in outcomes)) for name in names]
    head, *rows = [head, *facts] if len(runs) <= MOST_SIDE_BY_SIDE else zip(head, *facts, strict=True)
    console = make_console()
    console.print(printable("\n".join(above)), markup=False, highlight=False)
    console.print(make_table("", head, rows))
    console.print(printable("\n".join(below)), markup=False, highlight=False)
    if page:
        print(f"written: {write_page(page, [*above, *below], [head, *rows], outcomes)}")


EXPORT = Command(
    "export", "writes a checkpoint's buffer to Parquet, one row a completion", _add_export_options, _export
)
REPORT = Command(
    "report",
    "what a run came to and what to change, or how runs differ; --html writes a page",
    _add_report_options,
    _report,
)
