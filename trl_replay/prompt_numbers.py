"""The prompts of a table's rows as small numbers: what concerns a prompt is looked up by them, not searched for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_ROOM = 1024
"""Rows, and prompts, for which there is room at first."""


class PromptNumbers:
    """Which rows are of one prompt. Numbers of prompts that have gone are given out again.

    Args:
        prompts (`(n,)` int64): Of the rows that there are.
    """

    def __init__(self, prompts: NDArray[np.int64]) -> None:
        self._number_of: dict[int, int] = {}
        self._rows_of: list[int] = []  # how many, by number
        self._free: list[int] = []
        self._of_rows: NDArray[np.int64] = np.zeros(FIRST_ROOM, np.int64)
        self._length = 0
        self._marks: NDArray[np.int32] = np.zeros(FIRST_ROOM, np.int32)  # by number; all 0 between two questions
        self.append(prompts)

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._number_of)

    def append(self, prompts: NDArray[np.int64]) -> None:
        """Further rows at the end, of these prompts."""
        numbers = [self._numbered(prompt) for prompt in prompts.tolist()]
        start = self._length
        end = start + len(numbers)
        self._length = end
        if end > len(self._of_rows):
            self._of_rows = _with_room(self._of_rows, end)
        if len(self._rows_of) > len(self._marks):
            self._marks = _with_room(self._marks, len(self._rows_of))
        self._of_rows[start:end] = numbers

    def _numbered(self, prompt: int) -> int:
        number = self._number_of.get(prompt)
        if number is None:
            if not self._free:
                self._free.append(len(self._rows_of))
                self._rows_of.append(0)
            number = self._free.pop()
            self._number_of[prompt] = number
        self._rows_of[number] += 1
        return number

    def remove(self, prompts: NDArray[np.int64], holes: NDArray[np.int64], movers: NDArray[np.int64]) -> None:
        """Rows of these prompts have gone; the rows at `movers` take the places of some, `holes`."""
        for prompt in prompts.tolist():
            number = self._number_of[prompt]
            self._rows_of[number] -= 1
            if not self._rows_of[number]:
                del self._number_of[prompt]
                self._free.append(number)
        self._of_rows[holes] = self._of_rows[movers]
        self._length -= len(prompts)

    def sizes(self, rows: NDArray[np.int64]) -> list[int]:
        """How many rows there are of each of these rows' prompts."""
        numbers: list[int] = self._of_rows[rows].tolist()
        return [self._rows_of[number] for number in numbers]

    def counts(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """`(n,)`: for each row, how many of these `rows` are of its prompt."""
        numbers = self._of_rows[rows]
        np.add.at(self._marks, numbers, 1)
        found = self._marks.take(self._of_rows[: self._length])
        self._marks[numbers] = 0
        return found

    def rows_beside(self, row: int) -> NDArray[np.int64]:
        """All rows of a row's prompt, in order."""
        used = self._of_rows[: self._length]
        return np.flatnonzero(used == used[row])

    def rows_of(self, prompts: Iterable[int]) -> NDArray[np.int64]:
        """All rows of these prompts, in order."""
        numbers = [self._number_of[prompt] for prompt in prompts if prompt in self._number_of]
        self._marks[numbers] = 1
        found = np.flatnonzero(self._marks.take(self._of_rows[: self._length]))
        self._marks[numbers] = 0
        return found


def _with_room(numbers: NDArray[Any], room: int) -> NDArray[Any]:
    """The numbers, and zeros behind them."""
    more = max(room, 2 * len(numbers)) - len(numbers)
    return np.append(numbers, np.zeros(more, numbers.dtype))
