"""TRL's log of a batch generated in several rounds: each metric once over all completions, and the table of
completions with the rows that are trained on. A column of ours there marks the rows in whose place stored groups
were trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .. import compat
from ..data.types import Ints

Column: TypeAlias = tuple[str, ...]
"""A column of the table of completions: its name, or that of the mapping it stands in and its name there."""
REPLACED = "replay/replaced"
"""Our column, which is filled when the whole batch is known. TRL keeps the last rows in deques, one a column, and
fails to log where one of them is shorter than the others."""
COUNTED = "num_tokens"
"""A running count, which TRL keeps itself."""
TERMINATED = ("mean_terminated_length", "min_terminated_length", "max_terminated_length")
CLIPPED = "completions/clipped_ratio"
CALLS = "tools/call_frequency"
FAILURES = "tools/failure_frequency"


@dataclass(slots=True)
class Round:
    """The trainer's log of one round.

    Attributes:
        rows (`int`): Completions of all processes.
        metrics (`dict[str, float]`): The mean of what was logged under each key.
        table (`dict[Column, list]`): Rows of the table of completions, by column.
    """

    rows: int
    metrics: dict[str, float] = field(default_factory=dict)
    table: dict[Column, list[Any]] = field(default_factory=dict)


def lengths_of_metrics(trainer: Any) -> dict[str, int]:
    """Return how often each metric has been logged since the trainer's last log."""
    return {key: len(values) for key, values in compat.training_metrics(trainer).items()}


class TrainerLog:
    """Tracks the log of one generation batch. Without further rounds it changes nothing.

    Args:
        trainer (`trl.GRPOTrainer`): Whose log it is.
        lengths (`Mapping[str, int]`): [`lengths_of_metrics`] before it was generated.
    """

    def __init__(self, trainer: Any, lengths: Mapping[str, int]) -> None:
        self._trainer = trainer
        self._lengths = lengths
        self._rounds: list[Round] = []
        self._before: dict[Column, list[Any]] = {}
        self._finished = False

    def add_round(self, rows: int) -> None:
        """Collect what was logged for the batch itself or for a further round of `rows` completions of all
        processes."""
        logged = Round(rows, self._new_metrics())
        for name, column in self._columns():
            entries = list(column)
            before = max(len(entries) - rows, 0)
            self._before.setdefault(name, entries[:before])
            logged.table[name] = entries[before:]
            column.clear()
        self._rounds.append(logged)

    def finish(self, origin: Ints, advantages: Sequence[float] | None, exact: Mapping[str, float]) -> None:
        """Write the table once, and every metric once.

        Args:
            origin (`(rows, 2)` int64): Of each row of the batch, the round and the row in it that it comes from.
            advantages (`Sequence[float]`, *optional*): Of all rows, where they were computed anew.
            exact (`Mapping[str, float]`): Metrics that are known for all completions together.
        """
        for key, values in compat.training_metrics(self._trainer).items():
            before = self._lengths.get(key, 0)
            if key == COUNTED or len(values) == before:
                continue
            value = exact[key] if key in exact else _over_all(key, self._rounds)
            values[before:] = [value]
        self._write_table(origin, advantages)

    def close(self) -> None:
        """Restore the table to the first round's rows after an error in a further round."""
        if not self._rounds or self._finished:
            return
        rows = np.arange(self._rounds[0].rows)
        self._write_table(np.stack([np.zeros_like(rows), rows], axis=1), None)

    def _write_table(self, origin: Ints, advantages: Sequence[float] | None) -> None:
        self._finished = True
        for name, column in self._columns():
            entries = self._entries(name, origin)
            if name == ("advantages",) and advantages is not None:
                entries = list(advantages)
            column.clear()
            column.extend(self._before.get(name, []) + entries)
        extra = compat.completions_table(self._trainer)["extra"]
        for name in [name for name, column in extra.items() if not column and name != REPLACED]:
            del extra[name]  # of a round that failed: no row that is left has a value

    def _entries(self, name: Column, origin: Ints) -> list[Any]:
        """Return the rows' values in a column; None where a round logged none, and nothing if none did."""
        of_rounds = [logged.table.get(name) or [] for logged in self._rounds]
        if not any(of_rounds):
            return []
        values: list[Any] = []
        for number, row in origin.tolist():
            logged = of_rounds[number]
            values.append(logged[row] if row < len(logged) else None)
        return values

    def _new_metrics(self) -> dict[str, float]:
        """Return the metrics logged since the last round: the mean, where a key was logged more than once."""
        seen: dict[str, int] = dict(self._lengths)
        for logged in self._rounds:
            for key in logged.metrics:
                seen[key] = seen.get(key, 0) + 1
        new = {}
        for key, values in compat.training_metrics(self._trainer).items():
            begin = seen.get(key, 0)
            since = values[begin:]
            if since and key != COUNTED:
                new[key] = float(np.mean(since))
                values[begin:] = [new[key]]
        return new

    def _columns(self) -> Iterator[tuple[Column, deque[Any]]]:
        """Return the table's columns without ours."""
        for name, column in compat.completions_table(self._trainer).items():
            if isinstance(column, deque):
                yield (name,), column
                continue
            for inner, nested in column.items():
                if inner != REPLACED:
                    yield (name, inner), nested


def _over_all(key: str, rounds: Sequence[Round]) -> float:
    """Combine a metric over the completions of all rounds."""
    logged = [one for one in rounds if key in one.metrics]
    values = np.array([one.metrics[key] for one in logged])
    weights = np.array([_weight(key, one) for one in logged])
    counted = (weights > 0) & ~np.isnan(values)
    if not counted.any():
        return float(values[0])
    values, weights = values[counted], weights[counted]
    name = key.rsplit("/")[-1]
    if name.partition("_")[0] == "max":
        return float(values.max())
    if name.partition("_")[0] == "min":
        return float(values.min())
    return float(np.average(values, weights=weights))


def _weight(key: str, logged: Round) -> float:
    """Return a round's weight in a metric: its completions, those that ended, or those that called tools."""
    if key.rsplit("/")[-1] in TERMINATED:
        return logged.rows * (1.0 - logged.metrics.get(CLIPPED, 0.0))
    if key == FAILURES:
        return logged.rows * logged.metrics.get(CALLS, 1.0)
    return float(logged.rows)


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
