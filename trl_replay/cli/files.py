"""`trl-replay export` and `report`: what reads the files of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Command


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="folder of a checkpoint, …/checkpoint-12, or of a run: its newest whole one"
    )
    parser.add_argument("out", type=Path, help="file to write: out.parquet")


def _export(options: argparse.Namespace) -> int:
    from ..offline.export import of_checkpoint, write
    from ..report.log import buffer_in

    source = of_checkpoint(buffer_in(options.checkpoint))
    count = write(options.out, source)
    print(f"written: {options.out}, {count} completions")
    return 0


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="run", type=Path, help="the trainer's output_dir, or one of its checkpoints")
    parser.add_argument("--out", type=Path, help="file to write; report.html in the run's folder if not given")


def _report(options: argparse.Namespace) -> int:
    from ..report.page import write_report

    path = write_report(options.folder, options.out)
    print(f"written: {path}")
    return 0


EXPORT = Command(
    "export", "writes a checkpoint's buffer to Parquet, one row a completion", _add_export_options, _export
)
REPORT = Command("report", "a run's log and buffer as one HTML page", _add_report_options, _report)
