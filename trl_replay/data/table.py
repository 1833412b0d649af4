"""The buffer's metadata as NumPy columns with one row per entry, and weighted sampling from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, ReplayError
from .rewards import RewardRule, weighted_rewards

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
COUNTED = ("peers", "newer")
"""Made when they are read: the entries of the same prompt, each one included, and those of them that are newer."""
CORE = frozenset({*COLUMNS, *ROW_COLUMNS, *COUNTED})
NUMBER, PLACE = "_number", "_place"
"""Hidden columns: of each entry the number of its prompt, and its place among that prompt's entries. Places are whole
numbers without a gap, and newer entries have higher ones."""
COUNT, LAST, NEWEST = range(3)
"""Of each numbered prompt: its entries, the place of the newest, and the highest serial number that it had."""
MANY = 64
"""Where more entries come or leave at once, all are numbered anew."""
ENTRY = 168
"""Bytes that an entry takes beside columns and payload: its number, its place by number, a header of its bytes, and
where these and their kind are."""
BLOCKS = 8
"""For each number that is looked for, so many blocks of numbers are looked through."""
LARGEST_SCORE = 1e301
"""Weights below it have finite sums, of ten million entries, too."""


class Table:
    """Columns of equal length, readable as attributes: `table.score`, `table.row_reward`, … (see `COLUMNS` and
    `ROW_COLUMNS`).

    Copy a column to keep it: it changes as entries come and leave. Those two kinds can only be read so, a plugin's own
    can be written to.

    Attributes:
        reward_weights (`(functions,)` float64): The trainer's weight of each reward function, as it is today.
        counting (`int`, *optional*): The reward function that counts (`replay_reward`); None for the weighted sum.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], reward_weights: NDArray[np.float64], counting: int | None = None
    ) -> None:
        self._columns = dict(columns)  # with room for more rows than there are
        self._length = len(columns["serial"])
        self._fills: dict[str, float] = {}
        self._row_of: dict[int, int] | None = None  # by serial number, made when somebody asks
        self._changes = 0
        self._prompts: NDArray[np.int64] | None = None  # (n, 2), sorted, with numbers; None: made when somebody asks
        self._of_prompts = np.zeros((0, 3), np.int64)
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
        columns |= {name: np.zeros(0, np.int32) for name in (NUMBER, PLACE)}
        return cls(columns, np.ones(functions))

    def score_by(self, rule: RewardRule, counts: str | None) -> None:
        """Entries to come are scored by this rule; there are none.

        Args:
            rule ([`RewardRule`]): This.
            counts (`str`, *optional*): `replay_reward`.

        Raises:
            ConfigurationError: It has no function of that name.
        """
        self.counting, self.reward_weights = rule.number_of(counts), np.array(rule.weights)
        size = self._columns["row_rewards"].shape[1]
        self._columns["row_rewards"] = np.zeros((0, size, len(rule.functions)), np.float32)
        self._row_bytes = 0

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        column = self.writable(name)
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
        if name in columns:
            return columns[name][: self._length]
        if name not in COUNTED:
            raise AttributeError(f"The table has no column {name!r}; its columns are {', '.join(self.names)}.")
        of_prompts, number = self._numbered().astype(np.int32), self.writable(NUMBER)
        if name == "peers":
            return np.asarray(of_prompts[number, COUNT])
        return np.asarray(of_prompts[number, LAST] - self.writable(PLACE))

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
        return [*(name for name in self._columns if name not in (NUMBER, PLACE)), *COUNTED]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all columns, and of what Python needs for an entry beside."""
        if not self._row_bytes:
            sizes = [column.itemsize * math.prod(column.shape[1:]) for column in self._columns.values()]
            self._row_bytes = ENTRY + sum(sizes)
        return self._row_bytes

    def add_column(self, name: str, dtype: Any = np.float64, fill: float = 0) -> None:
        """Add a plugin's column; present and future entries hold `fill` until the plugin writes to it.

        Raises:
            ConfigurationError: The name is taken or no identifier, or the type is none of numbers.
        """
        if np.dtype(dtype).kind not in "biuf":
            raise ConfigurationError(f"Column {name!r} can't be added: {dtype!r} is not a numeric type.")
        if name in CORE or name in self._columns or hasattr(type(self), name) or not name.isidentifier():
            raise ConfigurationError(f"Column {name!r} can't be added: the name is taken or not an identifier.")
        self._columns[name] = np.full(len(self), fill, dtype)
        self._row_bytes = 0
        self._fills[name] = fill

    def append(self, values: Mapping[str, NDArray[Any]], count: int) -> None:
        """Append `count` rows; a column without values gets its fill."""
        first, left = self._length, self._length + count
        for name, column in self._columns.items():
            if left > len(column):
                longer = np.empty((left + left // 8, *column.shape[1:]), column.dtype)
                longer[:first] = column[:first]
                self._columns[name] = column = longer
            column[first:left] = values.get(name, self._fills.get(name, 0))
        self._length = left
        if self._row_of is not None:
            self._row_of.update(zip(self.serial[first:].tolist(), range(first, left), strict=True))
        self._changes += 1
        self._enter(first)

    def remove(self, rows: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """Remove distinct rows; the last rows move into the gaps. Return what moved: `(gap, row)`."""
        left = self._length - len(rows)
        leaving = set(rows.tolist())
        moved = [row for row in range(left, self._length) if row not in leaving]
        gaps = sorted(row for row in leaving if row < left)
        self._leave(rows)
        if self._row_of is not None:
            for serial in self.serial[rows].tolist():
                del self._row_of[serial]
            self._row_of.update(zip(self.serial[moved].tolist(), gaps, strict=True))
        if gaps:
            for column in self._columns.values():
                column[gaps] = column[moved]
        self._length = left
        self._changes += 1
        return zip(gaps, moved, strict=True)

    def _enter(self, first: int) -> None:
        """Number the entries from the row `first` on."""
        prompts, serials = self.prompt[first:].tolist(), self.serial[first:].tolist()
        for row, prompt, serial in zip(range(first, self._length), prompts, serials, strict=True):
            known = self._prompts
            if known is None or len(prompts) > MANY or len(known) > 2 * self._length + MANY:
                self._prompts = None
                return
            place = int(np.searchsorted(known[:, 0], prompt))
            if place == len(known) or known[place, 0] != prompt:
                self._prompts = known = np.insert(known, place, (prompt, len(known)), axis=0)
            number = known[place, 1]
            if number == len(self._of_prompts):
                self._of_prompts = np.concatenate([self._of_prompts, np.zeros((MANY + number // 8, 3), np.int64)])
            counted = self._of_prompts[number]
            if counted[COUNT] and serial < counted[NEWEST]:  # as in a checkpoint
                self._prompts = None
                return
            counted += 1
            counted[NEWEST] = serial
            self._columns[NUMBER][row], self._columns[PLACE][row] = number, counted[LAST]

    def _leave(self, rows: NDArray[np.int64]) -> None:
        """Close the gaps that these rows leave among the places of their prompts."""
        if self._prompts is None or len(rows) > MANY:
            self._prompts = None
            return
        numbers, places = self.writable(NUMBER), self.writable(PLACE)
        for row in rows.tolist():
            place, counted = places[row], self._of_prompts[numbers[row]]
            counted[COUNT] -= 1
            if place == counted[LAST]:
                counted[LAST] -= 1
            elif place > counted[LAST] - counted[COUNT]:  # neither the newest nor the oldest
                places[(numbers == numbers[row]) & (places < place)] += 1

    def _numbered(self) -> NDArray[np.int64]:
        """Return what is known of each numbered prompt, `(prompts, 3)`."""
        if self._prompts is None:
            prompts, numbers, counts = np.unique(self.prompt, return_inverse=True, return_counts=True)
            order = np.lexsort((self.serial, numbers))  # prompt by prompt, the newest last
            ends = np.cumsum(counts)
            self.writable(NUMBER)[:] = numbers
            self.writable(PLACE)[order] = np.arange(len(order)) - np.repeat(ends - counts, counts)
            newest = self.serial[order][ends - 1] if len(order) else ends
            self._of_prompts = np.stack([counts, counts - 1, newest], axis=1)
            self._prompts = np.stack([prompts, np.arange(len(prompts))], axis=1)
        return self._of_prompts

    @property
    def tasks(self) -> int:
        """Number of distinct tasks among the entries."""
        return int(np.count_nonzero(self._numbered()[:, COUNT]))

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Return a table of `rows`. A column is copied when it is first read: read it before entries come or leave."""
        return _Taken(self, rows)


class _Taken(Table):
    """Some rows of a table, whose columns are copied when they are first read."""

    def __init__(self, whole: Table, rows: NDArray[np.int64]) -> None:
        super().__init__({"serial": whole.serial[rows]}, whole.reward_weights, whole.counting)
        self._whole, self._rows = whole, rows
        self._changes = whole._changes

    @property
    def names(self) -> list[str]:
        """Names of all columns, including plugins'."""
        return self._whole.names

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, as of the whole table."""
        return self._whole.row_bytes

    def writable(self, name: str) -> NDArray[Any]:
        """Return the column's copy."""
        if name not in self._columns:
            if self._changes != self._whole._changes:
                raise ReplayError(f"table.{name} is read too late: entries have come or left since it was drawn from.")
            self._columns[name] = self._whole.writable(name)[self._rows]
        return super().writable(name)


def lowest(first: NDArray[Any], then: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the rows of the `count` lowest numbers, the lowest first, without sorting the others.

    Args:
        first (`(n,)`): Numbers, none of them NaN.
        then (`(n,)`): Decides between equal ones.
        count (`int`): How many; no more than `n` are returned.
    """
    count = min(max(count, 0), len(first))
    if not count:
        return np.empty(0, np.int64)
    last = first.min()
    if np.count_nonzero(first == last) < count:  # where most are equal, a partition is slow
        last = first[_lowest_ones(first, count)].max()
    below, equal = np.flatnonzero(first < last), np.flatnonzero(first == last)
    needed = count - len(below)
    if needed < len(equal):
        equal = equal[_lowest_ones(then[equal], needed)]
    rows = np.concatenate([below, equal])
    return rows[np.lexsort((then[rows], first[rows]))]


def _lowest_ones(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return where the `count` lowest of some numbers are, in any order."""
    if count < 1:
        return np.empty(0, np.int64)
    rows = np.arange(len(values))
    width = len(values) // (BLOCKS * count)
    if width > 1:  # so many blocks hold one each: none of the others is above the highest of these
        lowest_of_blocks = np.minimum.reduceat(values, rows[::width])
        rows = np.flatnonzero(values <= np.partition(lowest_of_blocks, count - 1)[count - 1])
    return rows[np.argpartition(values[rows], count - 1)[:count]]


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
    if weights.min(initial=1.0) > 1e-290 and weights.max(initial=1.0) < 1e290:
        keys = exponentials / weights
        rows = _lowest_ones(keys, min(count, len(keys)))
        return rows[np.argsort(keys[rows])]
    positive = np.isfinite(weights) & (weights > 0)
    usual = np.where(positive, weights, 1.0)
    keys = np.log(exponentials) - np.log(usual)  # quotients might be 0 or infinite, and equal
    rank = np.where(positive, 1, 2)  # 2: zero, negative and NaN
    rank[weights == np.inf] = 0
    return lowest(rank, keys, count)
