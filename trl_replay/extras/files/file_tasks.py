"""The tasks of groups in files: the dataset's columns, and a hash where these do not tell everything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from typing import Any

from ... import compat
from ...data.tasks import PROMPT_COLUMNS, Tasks
from ...errors import ReplayError, SeamError
from ...generation.dataset_rows import Dataset
from .schema import FINGERPRINT, Row, own_column

TASK = "trl_replay_task"
"""Column of the task's hash. It counts where the file was written with the same `replay_task_columns`."""
TASK_COLUMNS = "trl_replay_task_columns"
"""Key of a Parquet file's metadata: `replay_task_columns`, as JSON."""
IN_JSON = "trl_replay_json"
"""Key of a Parquet file's metadata: which columns hold JSON."""
UNKNOWN = 0
"""A task that a file does not tell."""
AMBIGUOUS = "its file does not say which of several tasks it is"


class FileTasks:
    """Tells the tasks of a file's rows by the columns of the trainer's dataset.

    Args:
        trainer (`trl.GRPOTrainer`): Whose tasks they may be.
        tasks ([`Tasks`]): Tells them apart.
        metadata (`Mapping[str, str]`): Of the file.

    Attributes:
        dataset ([`Dataset`]): The trainer's.
    """

    def __init__(self, trainer: Any, tasks: Tasks, metadata: Mapping[str, str]) -> None:
        self._tasks = tasks
        self.dataset = dataset_of(trainer, tasks)
        self._columns = _columns(trainer, self.dataset, tasks)
        self._is_exported = FINGERPRINT in metadata
        self._trusts_hash = metadata.get(TASK_COLUMNS) == json.dumps(tasks.columns)
        self._by_prompt: dict[int, int] | None = None

    def of(self, row: Row) -> int:
        """The task of a row; `UNKNOWN` if several tasks have its prompt, or that can't be told."""
        columns = self._columns or set()
        found = self._found(row, columns)
        told = max(int(row.get(TASK) or UNKNOWN), UNKNOWN)  # a group's own is no other run's
        if found.get("prompt") is not None and columns - {*PROMPT_COLUMNS[1:]} <= found.keys():
            key = self._tasks.key(found)
            if self._is_exported or told in (key, UNKNOWN) or self.dataset.size is None:
                return key
            if key in self._known or told not in self._known:
                return key
            return told  # exported, and read by others: what was a list or a number in its columns is text now
        if self._trusts_hash and row.get(TASK):
            return told
        if self._columns is None or self.dataset.size is None:
            return UNKNOWN
        return self._of_prompt({**found, "prompt": found.get("prompt") or row["prompt"]})

    def row(self, row: Row, task: int) -> dict[str, Any]:
        """Return the row of the dataset that a file's row stands for: with the file's columns, and where it lacks
        some, those of the dataset's row of its task.

        Raises:
            ReplayError: Neither has a column.
        """
        columns = self.dataset.columns
        if columns is None:  # a stream that does not tell them
            columns = {name for name in row if not own_column(name) and name != TASK}
        found = self._found(row, columns)
        number = self.dataset.number_of(task) if self.dataset.size is not None and task > UNKNOWN else None
        made = {"prompt": row["prompt"]} | ({} if number is None else self.dataset.row(number)) | found
        missing = sorted(columns - made.keys() - {*PROMPT_COLUMNS})
        if missing:
            raise ReplayError(
                f"it lacks {', '.join(map(repr, missing))}, which reward functions get from the dataset, and no one "
                "row of that has its prompt: add the columns to the file (null, if the functions read none)"
            )
        return {name: made[name] for name in made if name in columns or name == "prompt"}

    @cached_property
    def prompt_form(self) -> type | None:
        """`list` where the dataset's prompts are messages, `str` where they are texts; None where that is not
        known."""
        if not self.dataset.size:
            return None
        prompt = self.dataset.row(0).get("prompt")
        return type(prompt) if isinstance(prompt, str | list) else None

    def _found(self, row: Row, columns: Set[str]) -> dict[str, Any]:
        """The dataset's columns that a row has."""
        named = {name: column_name(name, row, self._is_exported) for name in columns}
        return {name: row[column] for name, column in named.items() if column in row}

    @cached_property
    def _known(self) -> set[int]:
        """The tasks of the dataset."""
        return {self._tasks.key(row) for row in self.dataset}

    def _of_prompt(self, found: Mapping[str, Any]) -> int:
        """The task of a row that lacks columns: the one with its prompt."""
        alone = Tasks([])
        if self._by_prompt is None:
            self._by_prompt = {}
            for row in self.dataset:
                key = self._tasks.key(row)
                if self._by_prompt.setdefault(alone.key(row), key) != key:
                    self._by_prompt[alone.key(row)] = UNKNOWN
        prompt = alone.key(found)
        return self._by_prompt.get(prompt, prompt)


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
    left = {task for task in wanted if task > UNKNOWN}
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


def _columns(trainer: Any, dataset: Dataset, tasks: Tasks) -> set[str] | None:
    """The columns that tell tasks apart; None if they are not known, or do not tell it alone."""
    if compat.has_environments(trainer):
        return None
    if tasks.columns is not None:
        return {"prompt", *tasks.columns}
    return dataset.columns
