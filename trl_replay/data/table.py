"""The buffer's metadata as NumPy columns with one row per entry, and weighted sampling from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .rewards import weighted_rewards

COLUMNS: dict[str, Any] = {
    "serial": np.int64,  # unique, grows in the order of generation
    "update": np.int64,  # updates done when the group was generated
    "score": np.float64,  # the scorer's priority
    "tag": np.float64,  # uniform in (0, 1], drawn once at admission
    "uses": np.int32,  # times replayed
    "reward_mean": np.float32,
    "reward_std": np.float32,
    "tokens": np.int32,  # trainable completion tokens
    "items": np.int32,  # tokens in num_items_in_batch: the trainable ones from TRL 1.9 on
    "prompt": np.int64,  # hash of the prompt's tokens
    "peers": np.int32,  # entries of the same prompt, this one included
    "newer": np.int32,  # those of them that are newer than this one
    "nbytes": np.int64,  # bytes of payload, all rows of the group
    "origin": np.int32,  # 0 generated here, 1 from a file with its log-probs, 2 from a file with the policy's own
    "keys": np.int32,  # which set of batch keys the payload can restore
    "owner": np.int32,  # rank that holds the payload
}


ROW_COLUMNS: dict[str, Any] = {
    "row_rewards": np.float32,  # (n, G, functions): raw reward of each function, NaN where None
    "row_advantage": np.float32,  # as it was trained on
    "row_logp": np.float32,  # mean log-prob a trainable token under the generating policy; NaN without any
    "row_length": np.int32,  # completion tokens
    "row_items": np.int32,  # tokens in num_items_in_batch, unless the row is masked
    "row_masked": np.bool_,  # whether the row trains nothing
}
"""Columns of shape `(n, G)`, one value a row of the group (of `row_rewards` one a reward function, too)."""
CORE = frozenset({*COLUMNS, *ROW_COLUMNS})
LARGEST_SCORE = 1e301
"""Weights below it have finite sums, of ten million entries, too."""


class Table:
    """Columns of equal length, readable as attributes: `table.score`, `table.row_reward`, … (see `COLUMNS` and
    `ROW_COLUMNS`).

    Copy a column to keep it: it changes, and is another array once entries have come or left. Those two kinds can only
    be read so, a plugin's own can be written to.

    Attributes:
        reward_weights (`(functions,)` float64): The trainer's weight of each reward function, as it is today.
        counting (`int`, *optional*): The reward function that counts (`replay_reward`); None for the weighted sum.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], reward_weights: NDArray[np.float64], counting: int | None = None
    ) -> None:
        self._columns = dict(columns)
        self._fills: dict[str, float] = {}
        self._row_of: dict[int, int] | None = None  # by serial number, made anew after every change
        self._row_bytes = 0  # counted when somebody asks
        self.reward_weights = reward_weights
        self.counting = counting

    @classmethod
    def empty(cls, size: int = 1, functions: int = 1) -> Table:
        """A table without entries.

        Args:
            size (`int`): Rows of a group.
            functions (`int`): Reward functions.
        """
        columns = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}
        for name, dtype in ROW_COLUMNS.items():
            shape = (0, size, functions) if name == "row_rewards" else (0, size)
            columns[name] = np.zeros(shape, dtype)
        return cls(columns, np.ones(functions))

    def __len__(self) -> int:
        return len(self._columns["serial"])

    def __getattr__(self, name: str) -> NDArray[Any]:
        column = self.writable(name)[:]
        if name in CORE:
            column.flags.writeable = False
        return column

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name.startswith("_") or name in ("reward_weights", "counting")):
            raise AttributeError(
                f"table.{name} can't be replaced: write into a column of your own, table.{name}[rows] = …, which "
                "session.buffer.table.add_column creates."
            )
        super().__setattr__(name, value)

    def writable(self, name: str) -> NDArray[Any]:
        """Return a writable column, for the buffer and its decisions, and for a scope's `owner`."""
        columns: dict[str, NDArray[Any]] = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(f"The table has no column {name!r}; its columns are {', '.join(columns)}.")
        return columns[name]

    def rows_of(self, serials: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each entry with these serial numbers, -1 where there is none."""
        if self._row_of is None:
            self._row_of = {serial: row for row, serial in enumerate(self.serial.tolist())}
        found = [self._row_of.get(int(serial), -1) for serial in serials]
        return np.array(found, np.int64)

    @property
    def row_reward(self) -> NDArray[np.float64]:
        """Each row's reward that counts, `(n, G)`: that of the function that `replay_reward` names, otherwise
        `row_total`.

        NaN for a row that it did not score. `row_total` in groups of which it scored none.
        """
        if self.counting is None:
            return self.row_total
        counted = self.row_rewards[..., self.counting].astype(np.float64)
        return np.where(np.isnan(counted).all(axis=1, keepdims=True), self.row_total, counted)

    @property
    def row_total(self) -> NDArray[np.float64]:
        """Each row's weighted reward with the trainer's current weights, `(n, G)`; NaN for a row without any."""
        return weighted_rewards(self.row_rewards.astype(np.float64), self.reward_weights)

    @property
    def row_trainable(self) -> NDArray[np.int64]:
        """Trained tokens of each row, `(n, G)`, in TRL before 1.9 including those of tools; 0 for a truncated row that
        the loss leaves out (`mask_truncated_completions`)."""
        return np.where(np.isnan(self.row_logp), 0, self.row_items)

    @property
    def row_trains(self) -> NDArray[np.bool_]:
        """Whether a row has a trained token and is not masked, `(n, G)`. A mixer may choose only such rows."""
        return np.asarray((self.row_trainable > 0) & ~self.row_masked)

    @property
    def names(self) -> list[str]:
        """Names of all columns, including plugins'."""
        return list(self._columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all columns."""
        if not self._row_bytes:
            self._row_bytes = sum(column.itemsize * math.prod(column.shape[1:]) for column in self._columns.values())
        return self._row_bytes

    def add_column(self, name: str, dtype: Any = np.float64, fill: float = 0) -> None:
        """Add a plugin's column; present and future entries hold `fill` until the plugin writes to it.

        Raises:
            ConfigurationError: The name is taken or no identifier, or the type is none of numbers.
        """
        if np.dtype(dtype).kind not in "biuf":
            raise ConfigurationError(f"Column {name!r} can't be added: {dtype!r} is not a numeric type.")
        if name in self._columns or hasattr(type(self), name) or not name.isidentifier():
            raise ConfigurationError(f"Column {name!r} can't be added: the name is taken or not an identifier.")
        self._columns[name] = np.full(len(self), fill, dtype)
        self._row_bytes = 0
        self._fills[name] = fill

    def append(self, values: Mapping[str, NDArray[Any]], count: int) -> None:
        """Append `count` rows; a column without values gets its fill."""
        longer = {}
        for name, column in self._columns.items():
            given = values.get(name, self._fills.get(name, 0))
            more = np.full((count, *column.shape[1:]), given, column.dtype)
            longer[name] = np.concatenate([column, more])
        self._take_columns(longer)

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove distinct rows; the last rows move into the gaps."""
        left = len(self) - len(rows)
        stays = np.ones(len(self), bool)
        stays[rows] = False
        order = np.arange(left)
        order[~stays[:left]] = left + np.flatnonzero(stays[left:])
        self._take_columns({name: column[order] for name, column in self._columns.items()})

    def _take_columns(self, columns: dict[str, NDArray[Any]]) -> None:
        """Replace the columns after rows were added or removed, and recount the entries of each prompt."""
        self._row_of = None
        columns["peers"][:], columns["newer"][:] = _counted(columns["prompt"], columns["serial"])
        self._columns = columns

    @property
    def tasks(self) -> int:
        """Number of distinct tasks among the entries."""
        return len(np.unique(self.prompt))

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Return a table with copies of `rows`."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        return Table(columns, self.reward_weights, self.counting)


def _counted(prompts: NDArray[np.int64], serials: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count, for each row, the rows of its prompt and the newer ones among them."""
    order = np.lexsort((-serials, prompts))  # prompt by prompt, of one prompt the newest first
    ordered = prompts[order]
    begins = np.ones(len(order), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    first = np.flatnonzero(begins)
    counts = np.diff(first, append=len(order))
    peers = np.empty(len(order), np.int64)
    newer = np.empty(len(order), np.int64)
    peers[order] = np.repeat(counts, counts)
    newer[order] = np.arange(len(order)) - np.repeat(first, counts)
    return peers, newer


def weighted_sample(weights: NDArray[Any], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw distinct indices with probabilities proportional to `weights`, sequentially and without replacement.

    Infinite weights are drawn first. A weight that is zero, negative or NaN is drawn only when no positive one is
    left. All of a class have equal chances there, so that a buffer of worthless scores is still drawn from uniformly.

    Args:
        weights (`(n,)`): Any real numbers; only their ratios matter.
        count (`int`): How many to draw; no more than `n` are returned.
        rng (`numpy.random.Generator`): How far it is advanced depends on the arguments alone, so that processes with
            equal ones go on drawing alike.

    Returns:
        `(min(count, n),)` int64 indices, the first drawn first.

    Source: exponential keys (Efraimidis & Spirakis, 2006, "Weighted random sampling with a reservoir").
    """
    weights = np.asarray(weights, dtype=np.float64)
    exponentials = rng.standard_exponential(len(weights))
    positive = np.isfinite(weights) & (weights > 0)
    keys = np.log(exponentials) - np.log(np.where(positive, weights, 1.0))
    rank = np.full(len(weights), 2)  # zero, negative and NaN
    rank[positive] = 1
    rank[weights == np.inf] = 0
    order = np.lexsort((keys, rank))
    return order[: max(count, 0)]
