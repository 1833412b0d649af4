"""Rows of the trainer's dataset: their prompts' identity, and a source of new prompts."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import compat
from ..data.types import Ints, Row
from ..errors import SeamError

TRIES = 8
LEAST_TRIES = 64
"""Rows that are looked at for each that is wanted, and at least: a dataset may repeat a few prompts many times."""
ROWS_REMEMBERED = 1024
"""Raw rows that are kept for `prompt_rows`; others are looked up in the dataset."""


def repeated(rows: Sequence[Row], size: int) -> list[Row]:
    """Repeat each row `size` times as copies, since the trainer writes into its inputs."""
    return [copy.deepcopy(row) for row in rows for _ in range(size)]


Data: TypeAlias = tuple[Any, Callable[[list[Any]], Any]]
"""A dataset, and what makes a batch of some of its rows."""


class Dataset:
    """The trainer's dataset, by row number.

    Args:
        data (`Callable`): Gives the dataset and what makes a batch of its rows: both may change with every `train()`.
        key (`Callable`): Tells rows apart.
    """

    def __init__(self, data: Callable[[], Data], key: Callable[[Row], int]) -> None:
        self._data = data
        self.key = key
        self._numbers: dict[int, int] = {}
        self._indexed: Any = None

    def __len__(self) -> int:
        """Number of rows.

        Raises:
            SeamError: It is a stream.
        """
        dataset, _ = self._data()
        if compat.streams(dataset):
            raise SeamError(
                f"The trainer's dataset is a stream ({type(dataset).__name__}) without row numbers: it has no new "
                "prompts, and only the rows seen last can be found by key. Use a dataset with a length."
            )
        return len(dataset)

    @property
    def size(self) -> int | None:
        """Number of rows; None for a stream."""
        dataset, _ = self._data()
        return None if compat.streams(dataset) else len(dataset)

    @property
    def columns(self) -> set[str] | None:
        """Names of the columns; None for a stream that does not list them."""
        dataset, _ = self._data()
        names = getattr(dataset, "column_names", None)
        if names is None and self.size:
            names = self.row(0)
        return None if names is None else set(names)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, as the trainer's collator returns them."""
        return map(self.row, range(len(self)))

    def row(self, number: int) -> Row:
        """Return one row, as the trainer's collator returns it.

        Raises:
            SeamError: It gives something else than one row for one.
        """
        dataset, collate = self._data()
        collated = collate([dataset[number]])
        rows = collated if isinstance(collated, list) else []
        if len(rows) != 1 or not isinstance(rows[0], Mapping):
            raise SeamError(
                f"The trainer's data_collator returns a {type(collated).__name__} for a row of its dataset, not a "
                "list with that row, so new prompts can't be sampled. Use replay_refill='same(rounds=…)'."
            )
        return dict(rows[0])

    def number_of(self, key: int) -> int | None:
        """Return the number of the first row with this key. The first call reads the whole dataset."""
        dataset, _ = self._data()
        if self._indexed is not dataset:
            self._indexed = dataset
            self._numbers = {}
            for number in reversed(range(len(self))):
                self._numbers[self.key(self.row(number))] = number
        return self._numbers.get(key)


class PromptSource:
    """New prompts of the dataset: each once per epoch, shuffled. Ranks with their own batches share one order and take
    disjoint parts.

    Args:
        dataset ([`Dataset`]): Where they come from.
        seed (`int`): The same on all ranks.
        part (`int`): Which part is this rank's.
        parts (`int`): How many there are.

    Attributes:
        position (`int`): How many of this rank's part have been passed in this order.
        order (`int`): How many orders were begun before.
    """

    def __init__(self, dataset: Dataset, seed: int, part: int = 0, parts: int = 1) -> None:
        self._dataset = dataset
        self._seed = seed
        self._part = part
        self._parts = parts
        self.position = 0
        self.order = 0
        self._size = -1
        self._numbers: Ints = np.empty(0, np.int64)
        self._shuffled = (-1, -1)  # the order and the size that the numbers are of

    def take(self, count: int, present: Collection[int] = (), skip: Callable[[Row], bool] | None = None) -> list[Row]:
        """Return up to `count` rows with distinct keys that are not in `present`.

        Args:
            count (`int`): How many.
            present (`Collection[int]`): Keys that are there already.
            skip (`Callable`, *optional*): Tells rows that are not wanted.
        """
        rows: list[Row] = []
        others: list[Row] = []
        taken = set(present)
        left = min(self._begin(), count * TRIES + LEAST_TRIES)
        while len(rows) < count and left:
            row = self._next()
            key = self._dataset.key(row)
            unwanted = key in taken or (skip is not None and skip(row))
            (others if unwanted else rows).append(row)
            taken.add(key)
            left -= 1
        again = itertools.cycle(others or rows)  # a dataset with fewer prompts than are asked for
        missing = count - len(rows)
        return rows + list(itertools.islice(again, missing))

    def _next(self) -> Row:
        """Return the next row of this rank's part, or the first one of the next order."""
        if self.position == len(self._numbers):
            self.position = 0
            self.order += 1
            self._begin()
        number = int(self._numbers[self.position])
        self.position += 1
        return self._dataset.row(number)

    def _begin(self) -> int:
        """Compute this order's part if needed; return its length."""
        size = len(self._dataset)
        if self._size not in (-1, size):  # another dataset
            self.position = 0
        self._size = size
        if self._shuffled != (self.order, size):  # of ten million rows, shuffling takes a second
            rng = np.random.default_rng([self._seed, self.order])
            shuffled = rng.permutation(size)
            mine = shuffled[self._part :: self._parts]
            self._numbers = mine if len(mine) else shuffled
            self._shuffled = (self.order, size)
        self.position = min(self.position, len(self._numbers))
        return len(self._numbers)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the current order."""
        return {"position": self.position, "order": self.order, "size": self._size, "parts": self._parts}

    def load_any(self, states: Sequence[Mapping[str, int]]) -> None:
        """Continue at the saved position of this rank's part, or of the only state; with other parts, in the next
        order."""
        has_parts = len(states) == self._parts == states[0]["parts"]
        latest = max(states, key=lambda state: state["order"])
        self.load_state_dict(states[self._part] if has_parts else latest)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; with another number of ranks or rows, at the beginning of the next order."""
        self._size = -1
        same_rows = state["size"] == -1 or state["size"] == self._dataset.size
        if same_rows and state["parts"] == self._parts:
            self.position = state["position"]
            self.order = state["order"]
        else:
            self.position = 0
            self.order = state["order"] + 1


class RowMemory:
    """The rows seen last, by key, with the dataset as a fallback.

    Args:
        dataset ([`Dataset`], *optional*): Where rows are looked up that are not kept; None if it has no numbers.
    """

    def __init__(self, dataset: Dataset | None) -> None:
        self._dataset = dataset
        self._rows: OrderedDict[int, Row] = OrderedDict()

    def keep(self, key: int, row: Row) -> None:
        """Keep a row, which the caller must not change."""
        self._rows[key] = row
        self._rows.move_to_end(key)
        if len(self._rows) > ROWS_REMEMBERED:
            self._rows.popitem(last=False)

    def find(self, keys: Sequence[int]) -> list[Row]:
        """Return copies of the rows with these keys, in order; missing ones are omitted."""
        found = []
        for key in keys:
            row = self._rows.get(int(key))
            if row is None and self._dataset is not None:
                number = self._dataset.number_of(int(key))
                row = None if number is None else self._dataset.row(number)
            if row is not None:
                found.append(copy.deepcopy(row))
        return found
