"""A column in TRL's table of completions, which marks the rows in whose place stored groups were trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .. import compat

REPLACED = "replay/replaced"
"""Our column, which is filled when the whole batch is known. TRL keeps the last rows in deques, one a column, and
fails to log where one of them is shorter than the others."""


def add_column(trainer: Any) -> None:
    """Add the column: rows that were logged before were trained on themselves."""
    columns = compat.completions_table(trainer)
    logged = columns["prompt"]
    unmarked = [False] * len(logged)
    columns["extra"][REPLACED] = deque(unmarked, maxlen=logged.maxlen)


def mark_replaced(trainer: Any, replaced: Sequence[bool]) -> None:
    """Add a value for each row that the trainer has just logged, those of all processes, in its order.

    Of a scoring that was interrupted it may not be known what was logged: the column has as many rows as the others.
    """
    columns = compat.completions_table(trainer)
    column = columns["extra"][REPLACED]
    rows = len(columns["prompt"])
    column.extend(replaced)
    column.extend([False] * (rows - len(column)))


def take_column(trainer: Any) -> None:
    """Take the column away again."""
    compat.completions_table(trainer)["extra"].pop(REPLACED, None)
