"""`trl-replay estimate`: what replay could do for a run that was logged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .command import Command, add_json_option, positive
from .tables import make_console, make_table


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        help="a run's output_dir, one of its checkpoints, a trainer_state.json, or a completions_….parquet",
    )
    parser.add_argument("--size", type=positive, default=64, help="groups that a buffer would keep")
    parser.add_argument("--generations", type=positive, help="completions of a group, where nothing tells (8)")
    parser.add_argument("--ranks", type=positive, default=1, help="processes")
    parser.add_argument("--groups", type=positive, default=8, help="groups of a generation batch, on each process")
    parser.add_argument("--tokens", type=positive, help="mean tokens of a completion, where the log does not tell")
    parser.add_argument("--out", type=Path, help="HTML page to write")
    add_json_option(parser)


def _run(options: argparse.Namespace) -> int:
    from ..report.estimate import estimate
    from ..report.estimate_page import HEAD, course, facts, write_page

    found = estimate(
        options.source,
        buffer_size=options.size,
        num_generations=options.generations,
        ranks=options.ranks,
        groups=options.groups,
        completion_tokens=options.tokens,
    )
    if options.out is not None:
        write_page(found, options.out)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
        return 0
    console = make_console()
    console.print(make_table(found.source, ("", ""), facts(found)))
    console.print(make_table("Over the run", HEAD, course(found)))
    for words in found.advice:
        console.print(f"- {words}", markup=False)
    if options.out is not None:
        console.print(f"written: {options.out}", markup=False)
    return 0


ESTIMATE = Command(
    "estimate", "what replay could do for a logged run of GRPO, with or without replay", _add_options, _run
)
