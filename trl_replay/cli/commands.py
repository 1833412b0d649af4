"""The parser and the entry point: which commands there are, and what happens where one fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ReplayError
from .checking import CHECK
from .estimating import ESTIMATE
from .examples import EXAMPLE
from .files import EXPORT, INSPECT, REPORT
from .listing import LIST
from .parsing import Parser
from .planning import PLAN
from .running import RUN
from .tables import printable

COMMANDS = (RUN, LIST, CHECK, EXPORT, INSPECT, REPORT, ESTIMATE, PLAN, EXAMPLE)


def parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    main_parser = Parser(prog="trl-replay", description="A replay buffer for TRL's GRPOTrainer.")
    main_parser.add_argument("--version", action="version", version=f"trl-replay {__version__}")
    subparsers = main_parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ReplayError, OSError) as error:  # the latter where a file can't be read or written
        print(f"trl-replay: {printable(str(error))}", file=sys.stderr)
        return 1
    return status
