"""The tasks of groups in files: the dataset's columns, and a hash where these do not tell everything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ... import compat
from ...data.tasks import PROMPT_COLUMNS, Tasks
from ...errors import SeamError
from ...generation.dataset_rows import Dataset
from .schema import Row, own_column

TASK = "trl_replay_task"
"""Column of the task's hash."""
IN_JSON = "trl_replay_json"
"""Key of a Parquet file's metadata: which columns hold JSON."""


class RowError(ValueError):
    """Why the trainer could not have made a row. It counts; nothing is raised to the user."""


class FileTasks:
    """Finds the dataset's rows that a file's rows are of.

    Args:
        trainer (`trl.GRPOTrainer`): With the dataset.
        tasks ([`Tasks`]): Tells its rows apart.
    """

    def __init__(self, trainer: Any, tasks: Tasks) -> None:
        self._dataset = dataset_of(trainer, tasks)
        self._tasks = tasks
        self._columns = set() if compat.has_environments(trainer) else self._dataset.columns or set()
        self._needed = self._columns if tasks.columns is None else {"prompt", *tasks.columns}

    def of(self, row: Row, exported: bool) -> tuple[dict[str, Any], int]:
        """Return the trainer's input for a row: with the columns of the file and, where it lacks some, those of the
        dataset's row of its task; and that task.

        Args:
            row (`Mapping`): Of the file.
            exported (`bool`): Whether a session exported it.

        Raises:
            RowError: Several rows of the dataset have its prompt.
        """
        names = {name: column_name(name, row, exported) for name in self._columns}
        found = {name: row[column] for name, column in names.items() if column in row}
        made = {"prompt": row["prompt"], **found}
        told = max(int(row.get(TASK) or 0), 0)  # a group's own, below 0, is no other run's
        is_told = self._needed <= made.keys()
        key = self._tasks.key(made) if is_told else 0
        if told not in (key, 0) and told in self._numbers:  # its columns are no longer as they were: texts, for lists
            return self._dataset.row(self._numbers[told]), told
        if not is_told:
            of_prompt = self._by_prompt.get(_of_prompt(made), {})
            if len(of_prompt) > 1:
                lacking = ", ".join(map(repr, sorted(self._columns - made.keys())))
                raise RowError(f"several rows of the dataset have its prompt: add the columns {lacking}")
            key = next(iter(of_prompt), told or _of_prompt(made))
        number = None if self._columns <= made.keys() else self._numbers.get(key)
        return ({} if number is None else self._dataset.row(number)) | made, key

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


class DatasetColumns:
    """The dataset's columns as a file holds them: texts as they are, all else as JSON.

    Args:
        rows (`Mapping[int, Row]`): By task, its dataset row.

    Attributes:
        names (`list[str]`): Columns of the file.
        in_json (`list[str]`): Those of them that hold JSON.
    """

    def __init__(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        self._rows = {task: _in_file(row) for task, row in rows.items()}
        self.names: list[str] = []
        self.in_json: list[str] = []
        for name in dict.fromkeys(name for row in self._rows.values() for name in row):
            self._add([row for row in self._rows.values() if row.get(name) is not None], name)

    def _add(self, rows: Sequence[dict[str, Any]], name: str) -> None:
        if not all(isinstance(row[name], str) for row in rows):
            try:
                texts = [json.dumps(row[name], default=_listed) for row in rows]
            except TypeError:  # JSON can't hold it: the hash tells
                return
            for row, text in zip(rows, texts, strict=True):
                row[name] = text
            self.in_json.append(name)
        self.names.append(name)

    def of(self, task: int) -> dict[str, str | None]:
        """Return what a file's row has of them."""
        row = self._rows.get(task, {})
        return {name: row.get(name) for name in self.names}


def dataset_rows(trainer: Any, tasks: Tasks, wanted: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """The dataset's rows of these tasks, as far as there are any; reads the dataset until all are found."""
    dataset = dataset_of(trainer, tasks)
    left = {task for task in wanted if task > 0}
    found: dict[int, Mapping[str, Any]] = {}
    if dataset.size is None:
        return found
    with suppress(SeamError):  # a collator that makes something else of rows
        for row in dataset:
            if not left:
                break
            task = tasks.key(row)
            if task in left:
                found[task] = row
                left.remove(task)
    return found


def column_name(name: str, row: Row, exported: bool = True) -> str:
    """Return the name of a dataset's column in a row of a file: `task/…` where the file has one of its own of that
    name. An exported file's own prompt is the text that the model was shown."""
    apart = f"task/{name}"
    if apart in row or own_column(name) or (exported and name == "prompt"):
        return apart
    return name


def _in_file(row: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset row without images, by the file's names."""
    return {column_name(name, {}): value for name, value in row.items() if name not in PROMPT_COLUMNS[1:]}


def _listed(value: Any) -> Any:
    """A NumPy number, array or tensor as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON holds no {type(value).__name__}")


def dataset_of(trainer: Any, tasks: Tasks) -> Dataset:
    """The dataset that the trainer trains on."""
    return Dataset(lambda: compat.training_data(trainer), tasks.key)
