"""The buffer's metadata as NumPy columns, one row an entry, and weighted drawing over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError
from .prompt_numbers import PromptNumbers
from .rewards import weighted_rewards

COLUMNS: dict[str, Any] = {
    "serial": np.int64,  # unique, grows in the order of generation
    "update": np.int64,  # updates done when the group was generated
    "score": np.float64,  # the scorer's priority
    "tag": np.float64,  # uniform in (0, 1], drawn once at admission
    "uses": np.int32,  # times replayed
    "last_used": np.int64,  # update of the last replay, -1 before the first
    "first_score": np.float64,  # the score at admission (replay_refresh changes `score`)
    "drift": np.float32,  # mean |log ratio| of the tokens at the last replay, 0 before the first
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
    "owner": np.int32,  # rank that holds the payload (gathered: every rank does)
}


ROW_COLUMNS: dict[str, Any] = {
    "row_rewards": np.float32,  # (n, G, functions): raw reward of each function, NaN where None
    "row_other_reward": np.float32,  # weighted reward in a file that does not name its functions, else NaN
    "row_advantage": np.float32,  # as it was trained on
    "row_logp": np.float32,  # mean log-prob a trainable token under the generating policy; NaN without any
    "row_length": np.int32,  # completion tokens
    "row_items": np.int32,  # tokens in num_items_in_batch, unless the row is masked
    "row_masked": np.bool_,  # whether the row trains nothing
}
"""Columns of shape `(n, G)`, one value a row of the group (of `row_rewards` one a reward function, too)."""
NEVER = -1
"""In `last_used` before the first use."""
CORE = frozenset({*COLUMNS, *ROW_COLUMNS})
FIRST_ROOM = 1024
"""Rows that a new table has room for."""
MANY = 4096
"""Rows from which on drawing and looking for the lowest go ways that pay for large tables only."""
BLOCKS = 64
"""Parts of a long column of which the lowest values are looked at first."""
SHORT_BLOCKS = 512
"""Parts of a long column that are summed before one of them is looked into."""
PROPOSALS = 8
"""How often indices are proposed for a draw from many, before what is left is drawn by sorting keys."""
FEW = 16
"""Most rows with older ones of their prompts that leave one by one; of more, what is left is counted anew."""
LARGEST = 1e301
"""Weights below it have finite sums, of ten million entries, too."""


class Table:
    """Columns of equal length, readable as attributes: `table.score`, `table.row_reward`, … (see `COLUMNS` and
    `ROW_COLUMNS`).

    A column is a view on the used rows: copy it to keep it. Those two kinds can only be read so, a plugin's own can
    be written to.

    Attributes:
        reward_weights (`(functions,)` float64): The trainer's weight of each reward function, as it is today.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], length: int, reward_weights: NDArray[np.float64] | None = None
    ) -> None:
        self._columns = dict(columns)
        self._fills: dict[str, float] = {"last_used": NEVER, "row_other_reward": np.nan}
        self._length = length
        self._row_of: dict[int, int] | None = None  # by serial number, from the first question on
        self._fingerprint: int | None = None  # likewise
        self._prompts: PromptNumbers | None = None  # likewise
        self.reward_weights = np.ones(1) if reward_weights is None else reward_weights

    @classmethod
    def preallocated(cls, capacity: int, size: int = 1, functions: int = 1) -> Table:
        """An empty table with room for `capacity` entries, at first for a thousand; it grows as it fills.

        Args:
            capacity (`int`): Entries.
            size (`int`): Rows of a group.
            functions (`int`): Reward functions.
        """
        room = min(max(capacity, 1), FIRST_ROOM)
        columns = {name: np.zeros(room, dtype) for name, dtype in COLUMNS.items()}
        for name, dtype in ROW_COLUMNS.items():
            shape = (room, size, functions) if name == "row_rewards" else (room, size)
            columns[name] = np.zeros(shape, dtype)
        return cls(columns, 0, np.ones(functions))

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> NDArray[Any]:
        return _read_only(name, self.writable(name))

    def writable(self, name: str) -> NDArray[Any]:
        """A column to write to, whoever's it is: for the buffer and what decides for it, and a scope's `owner`."""
        columns = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(f"The table has no column {name!r}; its columns are {', '.join(columns)}.")
        column: NDArray[Any] = columns[name][: self._length]
        return column

    def rows_of(self, serials: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each entry with these serial numbers, -1 where there is none; the work does not grow with the
        table."""
        rows = self._rows_by_serial()
        numbers = serials.tolist() if isinstance(serials, np.ndarray) else serials
        found = [rows.get(serial, -1) for serial in numbers]
        return np.array(found, np.int64)

    @property
    def fingerprint(self) -> int:
        """64 bits that tell which entries the table has, by their serial numbers, in whatever order; kept up to date
        with every change, so that asking costs nothing."""
        if self._fingerprint is None:
            self._fingerprint = _sum_of_hashes(self.serial)
        return self._fingerprint

    def _rows_by_serial(self) -> dict[int, int]:
        if self._row_of is None:
            self._row_of = {serial: row for row, serial in enumerate(self.serial.tolist())}
        return self._row_of

    @property
    def row_reward(self) -> NDArray[np.float64]:
        """`(n, G)`: each row's weighted reward, by the trainer's weights of today; NaN for a row without any."""
        weighted = weighted_rewards(self.row_rewards.astype(np.float64), self.reward_weights)
        other = self.row_other_reward
        return np.where(np.isnan(other), weighted, other)

    @property
    def row_trainable(self) -> NDArray[np.int64]:
        """`(n, G)`: trained tokens of each row, with those of tools in TRL before 1.9; 0 for a truncated row that is
        left out of the loss (`mask_truncated_completions`)."""
        return np.where(np.isnan(self.row_logp), 0, self.row_items)

    @property
    def row_trains(self) -> NDArray[np.bool_]:
        """`(n, G)`: whether a row has a trained token and is not masked. A mixer may choose such rows alone."""
        return np.asarray((self.row_trainable > 0) & ~self.row_masked)

    @property
    def names(self) -> list[str]:
        """Names of all columns, plugins' own included."""
        return list(self._columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all columns."""
        return sum(column[:1].nbytes for column in self._columns.values())

    def add_column(self, name: str, dtype: Any = np.float64, fill: float = 0) -> None:
        """Adds a plugin's column; entries present and to come hold `fill` until the plugin writes to it.

        Raises:
            ConfigurationError: The name is taken or no identifier, or the type is none of numbers.
        """
        if np.dtype(dtype).kind not in "biuf":
            raise ConfigurationError(f"Column {name!r} can't be added: {dtype!r} is no type of numbers.")
        if name in self._columns or hasattr(type(self), name) or not name.isidentifier():
            raise ConfigurationError(f"Column {name!r} can't be added: the name is taken or not an identifier.")
        size = len(self._columns["serial"])
        self._columns[name] = np.full(size, fill, dtype)
        self._fills[name] = fill

    def append(self, values: Mapping[str, NDArray[Any]], count: int) -> None:
        """Adds `count` rows at the end; a column without values gets its fill."""
        start = self._length
        end = start + count
        if end > len(self._columns["serial"]):
            self._grow(max(end, 2 * start))
        for name, column in self._columns.items():
            fill = self._fills.get(name, 0)
            column[start:end] = values.get(name, fill)
        self._length = end
        if self._row_of is not None:
            newcomers = self.serial[start:].tolist()
            self._row_of.update(zip(newcomers, range(start, end), strict=True))
        if self._fingerprint is not None:
            added = _sum_of_hashes(self.serial[start:])
            self._fingerprint = (self._fingerprint + added) % 2**64
        if self._prompts is not None:
            self._prompts.append(self.prompt[start:])

    def _grow(self, room: int) -> None:
        """Makes room for `room` rows."""
        grown = {}
        for name, column in self._columns.items():
            more = np.zeros((room - len(column), *column.shape[1:]), column.dtype)
            grown[name] = np.concatenate([column, more])
        self._columns = grown

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Removes distinct rows; the last rows move into their places."""
        if len(rows) == 0:
            return
        left = self._length - len(rows)
        gone = set(rows.tolist())
        holes = np.array(sorted(row for row in gone if row < left), np.int64)
        last_rows = range(left, self._length)
        movers = np.array([row for row in last_rows if row not in gone], np.int64)
        if self._fingerprint is not None:
            hashes = _sum_of_hashes(self.serial[rows])
            self._fingerprint = (self._fingerprint - hashes) % 2**64
        if self._row_of is not None:
            for serial in self.serial[rows].tolist():
                self._row_of.pop(serial, None)
            moved = self.serial[movers].tolist()
            self._row_of.update(zip(moved, holes.tolist(), strict=True))
        if self._prompts is not None:
            self._prompts.remove(self.prompt[rows], holes, movers)
        for column in self._columns.values():
            column[holes] = column[movers]
        self._length = left

    @property
    def tasks(self) -> int:
        """How many tasks the entries are of."""
        return len(self._numbered_prompts())

    def count_peers(self, prompts: NDArray[np.int64]) -> None:
        """Counts the columns `peers` and `newer` anew for the entries of these prompts."""
        rows = self._numbered_prompts().rows_of(prompts.tolist())
        peers, newer = _counted(self.prompt[rows], self.serial[rows])
        self.writable("peers")[rows] = peers
        self.writable("newer")[rows] = newer

    def joined(self, rows: NDArray[np.int64]) -> None:
        """Brings `peers` and `newer` up to date after these rows have come, at the end."""
        if not len(rows):
            return
        begin = rows[0]
        newest_before = self.serial[:begin].max(initial=-1)
        if newest_before > self.serial[begin:].min():  # some of those that have come are older
            self.count_peers(self.prompt[rows])
            return
        prompts = self._numbered_prompts()
        more = prompts.counts(rows)
        self.writable("peers")[:begin] += more[:begin]
        self.writable("newer")[:begin] += more[:begin]
        self.writable("peers")[begin:] = prompts.sizes(rows)
        if (more[begin:] > 1).any():  # several of one prompt
            _, newer = _counted(self.prompt[rows], self.serial[rows])
            self.writable("newer")[begin:] = newer
        else:
            self.writable("newer")[begin:] = 0

    def leave(self, rows: NDArray[np.int64]) -> None:
        """Removes distinct rows, and brings `peers` and `newer` of the others up to date."""
        peers = self.writable("peers")
        newer = self.writable("newer")
        prompts = self.prompt[rows]
        serials = self.serial[rows]
        older_ones = peers[rows] - newer[rows] - 1
        with_older = np.flatnonzero(older_ones)
        if len(with_older) > FEW:
            self.remove(rows)
            self.count_peers(prompts)
            return
        numbered = self._numbered_prompts()
        for number in with_older.tolist():
            serial = serials[number]
            leaving = (prompts == prompts[number]) & (serials < serial)
            if older_ones[number] > np.count_nonzero(leaving):
                others = numbered.rows_beside(rows[number])
                older = others[self.serial[others] < serial]
                newer[older] -= 1
        peers -= numbered.counts(rows)
        self.remove(rows)

    def _numbered_prompts(self) -> PromptNumbers:
        if self._prompts is None:
            self._prompts = PromptNumbers(self.prompt)
        return self._prompts

    def with_scores(self, scores: NDArray[np.float64]) -> Table:
        """The same rows with other scores; no column is copied."""
        return Table({**self._columns, "score": scores}, self._length, self.reward_weights)

    def take(self, rows: NDArray[np.int64]) -> Table:
        """A table of copies of `rows`, made column by column when first read."""
        return _Subset(self, rows)


class _Subset(Table):
    """Some rows of another table; a column is copied when it is first asked for, so unused ones cost nothing."""

    def __init__(self, source: Table, rows: NDArray[np.int64]) -> None:
        super().__init__({}, len(rows), source.reward_weights)
        self._source = source
        self._rows = rows

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._columns:
            column = getattr(self._source, name)
            self._columns[name] = _read_only(name, column[self._rows])
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        return self._source.names

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Copies of `rows` from the source itself: no column is copied as a whole on the way."""
        return _Subset(self._source, self._rows[rows])


def _sum_of_hashes(serials: NDArray[np.int64]) -> int:
    """The sum modulo 2^64 of each number's 64-bit hash (the last steps of SplitMix64; Steele et al., 2014)."""
    bits = serials.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((bits ^ (bits >> np.uint64(31))).sum(dtype=np.uint64))


def _counted(prompts: NDArray[np.int64], serials: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, how many rows are of its prompt, and how many of these are newer."""
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


def _read_only(name: str, column: NDArray[Any]) -> NDArray[Any]:
    """The column, which can't be written to any more if it is no plugin's."""
    if name in CORE:
        column.flags.writeable = False
    return column


def weighted_sample(weights: NDArray[Any], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draws distinct indices with probability in proportion to `weights`, one after the other without replacement.

    Infinite weights are drawn first. A weight that is zero, negative or NaN is drawn only when no positive one is
    left. All of a class have equal chances there, so that a buffer of worthless scores is still drawn from uniformly.

    Args:
        weights (`(n,)`): Any real numbers; only their ratios matter.
        count (`int`): How many to draw; no more than `n` are returned.
        rng (`numpy.random.Generator`): How far it is advanced depends on the arguments alone, so that processes with
            equal ones go on drawing alike.

    Returns:
        `(min(count, n),)` int64 indices, the first drawn first.

    Source: exponential keys (Efraimidis & Spirakis, 2006, "Weighted random sampling with a reservoir"); of few out of
    thousands, by inversion of the running sum, with what was drawn before passed over.
    """
    weights = np.asarray(weights, dtype=np.float64)
    count = max(count, 0)
    if len(weights) >= MANY and count * BLOCKS <= len(weights) and _are_ordinary(weights):
        return _drawn_from_many(weights, count, rng)
    return _drawn_by_keys(weights, count, rng)


def _drawn_by_keys(weights: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    exponentials = rng.standard_exponential(len(weights))
    if _are_ordinary(weights):
        return lowest(exponentials / (weights / weights.max()), count)
    positive = np.isfinite(weights) & (weights > 0)
    keys = np.log(exponentials) - np.log(np.where(positive, weights, 1.0))
    rank = np.full(len(weights), 2)  # zero, negative and NaN
    rank[positive] = 1
    rank[weights == np.inf] = 0
    order = np.lexsort((keys, rank))
    return order[:count].astype(np.int64)


def _drawn_from_many(weights: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Proposes indices by their weights, and passes over those that were drawn before: the same distribution, without
    a random number for each weight. If a few hold nearly all the weight, the rest is drawn by keys."""
    drawn: dict[int, None] = {}  # in order
    for _ in range(PROPOSALS):
        drawn |= dict.fromkeys(_by_running_sum(weights, rng.random(count)))
        if len(drawn) >= count:
            break
    found = np.array(list(drawn)[:count], np.int64)
    if len(found) < count:
        left = weights.copy()
        left[found] = 0.0
        found = np.append(found, _drawn_by_keys(left, count - len(found), rng))
    return found


def _by_running_sum(weights: NDArray[np.float64], points: NDArray[np.float64]) -> list[int]:
    """Where the running sum of weights passes each of these shares of the total: the block first, then the place."""
    width = len(weights) // SHORT_BLOCKS
    whole = weights[: SHORT_BLOCKS * width]
    rest = weights[SHORT_BLOCKS * width :]
    sums = whole.reshape(SHORT_BLOCKS, width).sum(axis=1)
    if len(rest):
        sums = np.append(sums, rest.sum())
    ends = np.cumsum(sums)
    passed = points * ends[-1]
    blocks = np.searchsorted(ends, passed, side="right")
    found = []
    for point, passed_blocks in zip(passed.tolist(), blocks.tolist(), strict=True):
        block = min(passed_blocks, len(ends) - 1)
        first = block * width
        here = rest if block == SHORT_BLOCKS else weights[first : first + width]
        inside = np.cumsum(here)
        begun = ends[block] - sums[block]
        place = int(np.searchsorted(inside, point - begun, side="right"))
        last = len(inside) - 1
        found.append(first + min(place, last))
    return found


def _are_ordinary(weights: NDArray[np.float64]) -> bool:
    """Whether there are weights, all positive, none so large that their sum overflows, and none so small beside
    another that divisions underflow."""
    if len(weights) == 0:
        return False
    low = weights.min()
    high = weights.max()
    return bool(low > 0 and high < LARGEST and low / high > 1e-200)


def lowest(keys: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Indices of the `count` lowest `keys`, lowest first, without sorting the rest."""
    count = max(min(count, len(keys)), 0)
    if count == 0:
        return np.empty(0, np.int64)
    if len(keys) < MANY:
        return _in_order(keys, np.argpartition(keys, count - 1)[:count])
    near = among_lowest(keys, count)
    chosen = np.argpartition(keys[near], count - 1)[:count]
    return _in_order(keys, near[chosen])


def _in_order(keys: NDArray[Any], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    return chosen[np.argsort(keys[chosen], kind="stable")]


def among_lowest(keys: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Indices that the `count` lowest `keys` are among, all that tie with them included; no NaN.

    Of a long column few: the lowest of many parts are compared first.
    """
    if len(keys) < MANY or count * BLOCKS > len(keys):
        return np.arange(len(keys))
    width = len(keys) // BLOCKS
    parts = keys[: BLOCKS * width].reshape(BLOCKS, width)
    minima = parts.min(axis=0)
    bound = np.partition(minima, count - 1)[count - 1]  # so many keys at least are as low as that
    return np.flatnonzero(keys <= bound)
