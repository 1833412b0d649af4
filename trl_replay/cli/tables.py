"""Tables and the console that they are printed on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def make_console() -> Console:
    """A console as wide as the terminal; 120 columns where there is none."""
    width = None if sys.stdout.isatty() else 120
    return Console(width=width)


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Table:
    """A table of texts, none of them markup: a plugin's words may hold brackets."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        cells = [Text(words) for words in row]
        table.add_row(*cells)
    return table
