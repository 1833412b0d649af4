"""The parser and the entry point: all commands, and the exit status after an error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ReplayError
from .demo import DEMO
from .estimating import ESTIMATE
from .files import EXPORT, REPORT
from .listing import LIST
from .running import RUN
from .tables import printable

COMMANDS = (DEMO, RUN, LIST, EXPORT, REPORT, ESTIMATE)


def parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    main_parser = argparse.ArgumentParser(prog="trl-replay", description="A replay buffer for TRL's GRPOTrainer.")
    main_parser.add_argument("--version", action="version", version=f"trl-replay {__version__}")
    subparsers = main_parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse_run(given) if given[:1] == [RUN.name] else parser().parse_args(given)
    try:
        status: int = options.run(options)
    except (ReplayError, OSError) as error:  # the latter where a file can't be read or written
        print(f"trl-replay: {printable(str(error))}", file=sys.stderr)
        return 1
    return status


def _parse_run(given: list[str]) -> argparse.Namespace:
    """Parse the options of `run` that come before `--`, with two more: `command`, the words after `--`, and `unknown`,
    words that no option takes."""
    end = given.index("--") if "--" in given else len(given)
    options, unknown = parser().parse_known_args(given[:end])
    options.command = given[end + 1 :]
    options.unknown = unknown
    return options
