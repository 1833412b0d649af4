"""Prompts that were logged as texts without special tokens: by TRL up to release 1.14, by verl, and by others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ... import compat
from ...data.tasks import Tasks
from .file_tasks import dataset_of
from .schema import Row
from .tokens import RowError, Tokens


class LoggedPrompts:
    """Finds the prompts of the dataset that were logged as texts.

    Args:
        trainer (`trl.GRPOTrainer`): With the dataset.
        tasks ([`Tasks`]): What its rows are.
        tokens ([`Tokens`]): As the model got them.
    """

    def __init__(self, trainer: Any, tasks: Tasks, tokens: Tokens) -> None:
        self._has_tools = compat.has_tools(trainer)
        self._has_environments = compat.has_environments(trainer)
        self._tokenizer = compat.tokenizer(trainer)
        self._tokens = tokens
        self._dataset = dataset_of(trainer, tasks)

    def restored(self, row: Row, by_trl: bool) -> Row:
        """Return a row with its prompt as the dataset has it.

        Args:
            row (`Row`): Whose prompt counts, not its token ids.
            by_trl (`bool`): Whether TRL logged it.

        Raises:
            RowError: The log does not tell enough.
        """
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not (by_trl or self.lacks_template(self._tokens.prompt(prompt))):
            return row
        if self._has_tools and (by_trl or prompt in self._by_text):
            raise RowError("it was logged as one text, which does not tell the words of tools")
        if prompt in self._by_text:
            return {**row, "prompt": self._by_text[prompt]}
        if by_trl and (self._dataset.size is None or any(text != one for text, one in self._by_text.items())):
            raise RowError("TRL logged its prompt without special tokens, and none of the dataset is logged so")
        return row

    def lacks_template(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt holds none of the special tokens that the dataset's have around their words."""
        return bool(self._markers) and self._markers.isdisjoint(prompt_ids)

    @cached_property
    def _markers(self) -> frozenset[int]:
        if not self._dataset.size or self._has_environments:
            return frozenset()
        prompt = self._dataset.row(0).get("prompt")
        return frozenset() if prompt is None else self._tokens.left_out(prompt)

    @cached_property
    def _by_text(self) -> dict[str, Any]:
        """The dataset's prompts, by their texts in the log."""
        if self._dataset.size is None:
            return {}
        prompts = [row["prompt"] for row in self._dataset]
        return {self._tokenizer.decode(self._tokens.prompt(one), skip_special_tokens=True): one for one in prompts}
