"""The type of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        name (`str`): As it is typed.
        summary (`str`): One line of help.
        add_options (`Callable`): Adds its options to a parser.
        run (`Callable`): Runs it; returns the exit status.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
