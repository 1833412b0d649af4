"""The tasks of groups in files: the dataset's columns, and a hash where these do not tell everything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from ... import compat
from ...data.tasks import PROMPT_COLUMNS, Tasks
from ...errors import SeamError
from ...generation.dataset_rows import Dataset
from .schema import Row

TASK = "trl_replay_task"
"""Column of an export: the hash of the dataset's row."""


class RowError(ValueError):
    """Why the trainer could not have made a row. It counts; nothing is raised to the user."""


class FileTasks:
    """Finds the dataset's rows that a file's rows are of.

    Args:
        trainer (`trl.GRPOTrainer`): With the dataset.
        tasks ([`Tasks`]): Tells its rows apart.
    """

    def __init__(self, trainer: Any, tasks: Tasks) -> None:
        self._dataset = Dataset(lambda: compat.training_data(trainer), tasks.key)
        self._tasks = tasks
        self._columns = set() if compat.has_environments(trainer) else self._dataset.columns or set()
        self._needed = self._columns if tasks.columns is None else {"prompt", *tasks.columns}

    def of(self, row: Row) -> tuple[dict[str, Any], int]:
        """Return the trainer's input for a row, and its task: the dataset's row that an export names; else the file's
        columns and, where it lacks some, those of the dataset's row with its prompt.

        Raises:
            RowError: Several rows of the dataset have its prompt.
        """
        told = row.get(TASK)
        if told in self._numbers:
            return self._dataset.row(self._numbers[told]), told
        names = {"prompt"} if told else {"prompt", *self._columns}  # an export's other columns are its own
        made = {name: row[name] for name in names if name in row}
        if self._needed <= made.keys():
            return made, self._tasks.key(made)
        of_prompt = self._by_prompt.get(_of_prompt(made), {})
        if len(of_prompt) > 1:
            lacking = ", ".join(map(repr, sorted(self._columns - made.keys())))
            raise RowError(f"several rows of the dataset have its prompt: add the columns {lacking}")
        for key, number in of_prompt.items():
            return self._dataset.row(number) | made, key
        return made, max(int(told or 0), 0) or _of_prompt(made)  # a task below 0 is that of one group

    @cached_property
    def _by_prompt(self) -> dict[int, dict[int, int]]:
        """By each prompt of the dataset, the first row of each of its tasks; none of a stream."""
        found: dict[int, dict[int, int]] = {}
        if self._dataset.size is not None and self._columns:
            with suppress(SeamError):  # a collator that makes something else of rows
                for number, row in enumerate(self._dataset):
                    found.setdefault(_of_prompt(row), {}).setdefault(self._tasks.key(row), number)
        return found

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The dataset's rows, by task."""
        return {key: number for of_prompt in self._by_prompt.values() for key, number in of_prompt.items()}

    @cached_property
    def first_prompt(self) -> Any:
        """The dataset's first prompt, text or messages; None where that is not known."""
        with suppress(SeamError):
            return self._dataset.row(0).get("prompt") if self._dataset.size else None
        return None

    def lacking(self, made: Mapping[str, Any]) -> list[str]:
        """Return the dataset's columns that an input lacks."""
        return sorted(self._columns - made.keys() - {*PROMPT_COLUMNS})


def _of_prompt(row: Mapping[str, Any]) -> int:
    return Tasks([]).key({"prompt": row.get("prompt")})
