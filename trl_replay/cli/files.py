"""`trl-replay export` and `report`: what reads the files of a run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..base.validation import unusable
from ..errors import ConfigurationError
from .command import Command
from .tables import printable


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="folder of a checkpoint, …/checkpoint-12, or of a run: its newest whole one"
    )
    parser.add_argument("out", type=Path, help="file to write: out.parquet")


def _export(options: argparse.Namespace) -> int:
    from ..extras.files.export import of_checkpoint, write
    from ..extras.report.log import buffer_in

    source = of_checkpoint(buffer_in(options.checkpoint))
    count = write(options.out, source)
    print(f"written: {options.out}, {count} completions")
    return 0


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="run",
        help="the trainer's output_dir, or one of its checkpoints; several are laid side by side, as label=folder "
        "where a label names their settings",
    )
    parser.add_argument("--out", type=Path, help="file to write; report.html in the run's folder, or here for several")
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="the reward function that counts, as in rewards/NAME/mean; replay_reward, or else the sum, if not given",
    )
    parser.add_argument("--level", type=float, help="of several runs: the value of that reward whose way is told")
    parser.add_argument(
        "--completions", type=int, help="of several runs: completions an update, where none are logged"
    )


def _report(options: argparse.Namespace) -> int:
    from ..extras.report.comparison import comparison, verdict
    from ..extras.report.page import write_page, write_report
    from ..extras.report.runs import read_run

    _refuse_unusable(options)
    if len(options.runs) == 1:
        path = write_report(options.runs[0], options.out, options.reward)
    else:
        runs = [read_run(given, options.completions) for given in options.runs]
        path = write_page(comparison(runs, options.reward, options.level), options.out or Path("report.html"))
        print(printable("\n".join(verdict(runs, options.reward))))
    print(f"written: {path}")
    return 0


def _refuse_unusable(options: argparse.Namespace) -> None:
    """Refuse options of the comparison that can't be used, or are given for one run."""
    if options.completions is not None and options.completions < 1:
        raise unusable("--completions", options.completions, "give a number of at least 1")
    if options.level is not None and not math.isfinite(options.level):
        raise unusable("--level", options.level, "give a finite number")
    if len(options.runs) > 1:
        return
    for name in ("completions", "level"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name} is for several runs: leave it out, or give one more.")
    (run,) = options.runs
    if "=" in run and not Path(run).exists():
        raise ConfigurationError(f"{run} does not exist, and a label is for several runs: give the folder alone.")


EXPORT = Command(
    "export", "writes a checkpoint's buffer to Parquet, one row a completion", _add_export_options, _export
)
REPORT = Command("report", "a run's log and buffer, or several runs, as one HTML page", _add_report_options, _report)
