"""The tasks of groups in files: an exported one holds a hash, any other the dataset's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import compat
from ..generation.dataset_rows import Dataset
from ..tasks import PROMPT_COLUMNS, Tasks
from .schema import FINGERPRINT, Row, own_column

TASK = "trl_replay_task"
"""Column of the task's hash. It counts where the file was written with the same `replay_task_columns`."""
TASK_COLUMNS = "trl_replay_task_columns"
"""Key of a Parquet file's metadata: `replay_task_columns`, as JSON."""
UNKNOWN = 0
"""A task that a file does not tell."""
AMBIGUOUS = "its file does not say which of several tasks it is"


class FileTasks:
    """Tells the tasks of a file's rows by the columns of the trainer's dataset.

    Args:
        trainer (`trl.GRPOTrainer`): Whose tasks they may be.
        tasks ([`Tasks`]): Tells them apart.
        metadata (`Mapping[str, str]`): Of the file.
    """

    def __init__(self, trainer: Any, tasks: Tasks, metadata: Mapping[str, str]) -> None:
        self._tasks = tasks
        self._dataset = Dataset(lambda: compat.training_data(trainer), tasks.key)
        self._columns = _columns(trainer, self._dataset, tasks)
        self._is_exported = FINGERPRINT in metadata
        self._trusts_hash = metadata.get(TASK_COLUMNS) == json.dumps(tasks.columns)
        self._by_prompt: dict[int, int] | None = None

    def of(self, row: Row) -> int:
        """The task of a row; `UNKNOWN` if several tasks have its prompt, or that can't be told."""
        columns = self._columns or set()
        found: dict[str, Any] = {}
        if not self._is_exported:  # there the prompt is the text that the model was shown
            found = {name: row[name] for name in columns if name in row and not own_column(name)}
        if found.get("prompt") is not None and columns - {*PROMPT_COLUMNS[1:]} <= found.keys():
            return self._tasks.key(found)
        if self._trusts_hash and row.get(TASK):
            return max(int(row[TASK]), UNKNOWN)  # a group's own is no other run's
        if self._columns is None or self._dataset.size is None:
            return UNKNOWN
        return self._of_prompt({**found, "prompt": row["prompt"]})

    def _of_prompt(self, found: Mapping[str, Any]) -> int:
        """The task of a row that lacks columns: the one with its prompt."""
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
