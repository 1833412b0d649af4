"""Which tasks the rows of a file belong to: a file has columns of the dataset, or does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import compat
from ..generation.dataset_rows import Dataset
from ..tasks import PROMPT_COLUMNS, Tasks
from .schema import Row, column_name

UNKNOWN = 0
"""A task that a file does not tell."""
AMBIGUOUS = "its file does not say which of several tasks it is"


class FileTasks:
    """Tells the tasks of a file's rows by the columns of the trainer's dataset.

    Args:
        trainer (`trl.GRPOTrainer`): Whose tasks they may be.
        tasks ([`Tasks`]): Tells them apart.
    """

    def __init__(self, trainer: Any, tasks: Tasks) -> None:
        self._tasks = tasks
        self._dataset = Dataset(lambda: compat.training_data(trainer), tasks.key)
        self._columns = _columns(trainer, self._dataset, tasks)
        self._by_prompt: dict[int, int] | None = None

    def of(self, row: Row) -> int:
        """The task of a row; `UNKNOWN` if several tasks have its prompt, or that can't be told."""
        if self._columns is None:
            return UNKNOWN
        found = {name: row[column_name(name, row)] for name in self._columns if column_name(name, row) in row}
        needed = self._columns - {*PROMPT_COLUMNS[1:]}
        if needed <= found.keys():
            return self._tasks.key(found)
        return self._of_prompt(found)

    def _of_prompt(self, found: Mapping[str, Any]) -> int:
        """The task of a row that lacks columns: the one with its prompt."""
        if self._dataset.size is None:
            return UNKNOWN
        alone = Tasks([])
        if self._by_prompt is None:
            self._by_prompt = {}
            for row in self._dataset:
                key = self._tasks.key(row)
                if self._by_prompt.setdefault(alone.key(row), key) != key:
                    self._by_prompt[alone.key(row)] = UNKNOWN
        prompt = alone.key(found)
        return self._by_prompt.get(prompt, prompt)


def _columns(trainer: Any, dataset: Dataset, tasks: Tasks) -> set[str] | None:
    """The columns that tell tasks apart; None if they are not known, or do not tell it alone."""
    if compat.has_environments(trainer):
        return None
    if tasks.columns is not None:
        return {"prompt", *tasks.columns}
    return dataset.columns
