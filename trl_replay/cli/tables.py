"""A command as the parser lists it, and tables on a terminal."""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text


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


ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of characters that a terminal acts on instead of showing them: controls, directions, halves of
characters, separators."""


def printable(text: str) -> str:
    """Escape every character that a terminal would act on: `\x1b`, `\u202e`.

    What a model wrote, or a file says, can't color, move, hide or reorder what is printed around it. New lines and
    tabs stay.
    """
    return "".join(_printable(character) for character in text)


def _printable(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ACTING:
        return character
    return character.encode("unicode_escape").decode()


def make_console() -> Console:
    """Return a console as wide as the terminal; 120 columns without one."""
    width = None if sys.stdout.isatty() else 120
    return Console(width=width)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of plain texts without markup: a plugin's text may contain brackets."""
    title_text = Text(printable(title), style="table.title")
    table = Table(title=title_text, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        cells = [Text(printable(words)) for words in row]
        table.add_row(*cells)
    return table
