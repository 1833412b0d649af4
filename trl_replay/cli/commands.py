"""The parser and the entry point: all commands, and the exit status after an error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__, run
from ..errors import ReplayError
from .demo import DEMO
from .listing import LIST
from .runs import EXPORT, REPORT
from .tables import printable

COMMANDS = (LIST, REPORT, EXPORT, DEMO)
RUN = "run"


def parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    main_parser = argparse.ArgumentParser(prog="trl-replay", description="A replay buffer for TRL's GRPOTrainer.")
    main_parser.add_argument("--version", action="version", version=f"trl-replay {__version__}")
    subparsers = main_parser.add_subparsers(metavar="command", required=True)
    subparsers.add_parser(RUN, help=run.SUMMARY, add_help=False)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [RUN]:
        run.main(given[1:])
        return 0
    options = parser().parse_args(given)
    try:
        status: int = options.run(options)
    except (ReplayError, OSError) as error:  # the latter where a file can't be read or written
        print(f"trl-replay: {printable(str(error))}", file=sys.stderr)
        return 1
    return status
