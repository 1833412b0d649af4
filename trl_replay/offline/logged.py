"""Rows of the tables of completions that TRL logs. Up to release 1.14 they hold texts without special tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .. import compat
from ..data.tasks import Tasks
from .file_tasks import dataset_of
from .schema import Row
from .tokens import RowError, Tokens


class LoggedPrompts:
    """Finds the prompts of the dataset that TRL logged as texts.

    Args:
        trainer (`trl.GRPOTrainer`): With the dataset.
        tasks ([`Tasks`]): What its rows are.
        tokens ([`Tokens`]): As the model got them.
    """

    def __init__(self, trainer: Any, tasks: Tasks, tokens: Tokens) -> None:
        self._has_tools = compat.has_tools(trainer)
        self._tokenizer = compat.tokenizer(trainer)
        self._tokens = tokens
        self._dataset = dataset_of(trainer, tasks)

    def restored(self, row: Row) -> Row:
        """Return a row with its prompt as the dataset has it.

        Raises:
            RowError: The log does not tell enough.
        """
        if not isinstance(row["prompt"], str):
            return row
        if self._has_tools:
            raise RowError("TRL logged it as one text, which does not tell the words of tools")
        if row["prompt"] in self._by_text:
            return {**row, "prompt": self._by_text[row["prompt"]]}
        if self._dataset.size is None or any(text != prompt for text, prompt in self._by_text.items()):
            raise RowError("TRL logged its prompt without special tokens, and none of the dataset is logged so")
        return row

    @cached_property
    def _by_text(self) -> dict[str, Any]:
        """The dataset's prompts, by their texts in the log."""
        if self._dataset.size is None:
            return {}
        prompts = [row["prompt"] for row in self._dataset]
        return {self._tokenizer.decode(self._tokens.prompt(one), skip_special_tokens=True): one for one in prompts}
