"""The replay buffer: a table of metadata, a storage of payloads, and the rules of capacity and eligibility."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocols import Storage
from .table import Table, lowest
from .types import Bools, Group, Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes an entry eligible for replay; None is no limit.

    Attributes:
        min_size (`int`): Entries that the buffer must hold before anything is replayed.
        max_age (`int`, *optional*): Updates since generation.
        max_uses (`int`, *optional*): Replays of one entry.
        cooldown (`int`, *optional*): Updates between two replays of one entry.
    """

    min_size: int = 1
    max_age: int | None = None
    max_uses: int | None = None
    cooldown: int | None = None


class ReplayBuffer:
    """Entries of up to `capacity` groups. The session fills and samples it; users look at it.

    Attributes:
        table ([`Table`]): The metadata columns.
        capacity (`int`): Groups (not rows, not tokens) that the buffer keeps.
        storage ([`Storage`]): Where the payloads are.
    """

    def __init__(self, capacity: int, storage: Storage, limits: Limits) -> None:
        self.capacity = capacity
        self.storage = storage
        self.limits = limits
        self.table = Table.preallocated(capacity)
        self._keysets: list[frozenset[str]] = []
        self._here: set[int] = set()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, and the used rows of all columns."""
        return self.storage.nbytes + len(self.table) * self.table.row_bytes

    def clear(self) -> None:
        """Forgets every entry. Groups noted but not yet settled are still stored later."""
        self._forget(np.arange(len(self)))

    def keyset(self, keys: frozenset[str]) -> int:
        """The number that stands for `keys` in the table's column of that name."""
        if keys not in self._keysets:
            self._keysets.append(keys)
        return self._keysets.index(keys)

    def offer(
        self, columns: Mapping[str, NDArray[Any]], rank: Callable[[Table], NDArray[Any]], rng: np.random.Generator
    ) -> tuple[list[int], int]:
        """Offers newcomers' columns; over capacity the lowest keep ranks leave, of equal ranks the older.

        Args:
            columns (`Mapping[str, NDArray]`): One value a newcomer; `tag` is drawn here.
            rank (`Callable`): Maps the table, newcomers included, to keep ranks.
            rng (`numpy.random.Generator`): Draws the newcomers' tags.

        Returns:
            `(stored, evicted)`: serials of the newcomers that stayed, whose payload is expected by `receive`, and the
            number of old entries that left.
        """
        serials: list[int] = columns["serial"].tolist()
        count = len(serials)
        tags = 1.0 - rng.random(count)  # in (0, 1]: log(tag) is finite
        self.table.append({"last_used": np.full(count, -1), **columns, "tag": tags}, count)
        left = self.trim(rank)
        present = set(self.table.serial.tolist()) if left else set(serials)
        stored = [serial for serial in serials if serial in present]
        return stored, left - (count - len(stored))

    def trim(self, rank: Callable[[Table], NDArray[Any]]) -> int:
        """Lets the lowest keep ranks leave until the rest fits; returns how many left."""
        excess = len(self.table) - self.capacity
        if excess <= 0:
            return 0
        return self._forget(_lowest_ranks(rank(self.table), self.table.serial, excess))

    @property
    def keysets(self) -> list[frozenset[str]]:
        """What the table's column `keys` counts in."""
        return list(self._keysets)

    def held(self) -> list[int]:
        """Serials of the entries whose payload is on this process, in the order of the table."""
        return [serial for serial in self.table.serial.tolist() if serial in self._here]

    def restore(self, columns: Mapping[str, NDArray[Any]], keysets: Sequence[frozenset[str]]) -> None:
        """Takes saved columns in the place of its own entries; the payload that belongs here follows by `receive`.

        Columns of plugins that are absent now are left out, and new plugins' columns get their fill.

        Args:
            columns (`Mapping[str, NDArray]`): All of `COLUMNS`, and plugins' own.
            keysets (`Sequence[frozenset[str]]`): What the column `keys` counts in.
        """
        self.clear()
        numbers = np.array([self.keyset(keys) for keys in keysets], np.int64)
        known = {name: columns[name] for name in self.table.names if name in columns}
        self.table.append({**known, "keys": numbers[columns["keys"]]}, len(columns["serial"]))

    def receive(self, groups: Mapping[int, Group]) -> None:
        """Puts away the payload that lives on this process, by serial."""
        for serial, group in groups.items():
            self.storage.put(serial, group)
            self._here.add(serial)

    def withdraw_missing(self, serials: Sequence[int]) -> None:
        """Takes back those of `serials` whose payload should be on this process and is not."""
        self.withdraw([serial for serial in serials if serial not in self._here])

    def withdraw(self, serials: Sequence[int]) -> None:
        """Takes back newcomers whose payload will not come."""
        self._forget(np.flatnonzero(np.isin(self.table.serial, serials)))

    def eligible(self, update: int, keys: frozenset[str]) -> tuple[Ints, dict[str, int]]:
        """Rows that may be replayed now, and how many entries each limit holds back.

        Args:
            update (`int`): Updates done so far. An entry is eligible only after one update since its generation.
            keys (`frozenset[str]`): Batch keys that a group must be able to restore.

        Returns:
            `(rows, held_back)`: row indices, and per reason the number of entries that it alone or with others
            excludes.
        """
        table, limits = self.table, self.limits
        if len(table) < limits.min_size:
            return np.empty(0, np.int64), {"replay_min_size": len(table)}
        age = update - table.step
        reasons: dict[str, Bools] = {"too new": age < 1}
        if limits.max_age is not None:
            reasons["replay_max_age"] = age > limits.max_age
        if limits.max_uses is not None:
            reasons["replay_max_uses"] = table.uses >= limits.max_uses
        if limits.cooldown is not None:
            reasons["replay_cooldown"] = (table.last_used >= 0) & (update - table.last_used < limits.cooldown)
        lacking = [number for number, have in enumerate(self._keysets) if not keys <= have]
        if lacking:
            reasons["lacks a tensor"] = np.isin(table.keys, lacking)
        excluded = np.logical_or.reduce(list(reasons.values()))
        return np.flatnonzero(~excluded), {name: int(mask.sum()) for name, mask in reasons.items() if mask.any()}

    def use(self, rows: Ints, update: int) -> None:
        """Marks `rows` as replayed in this update."""
        self.table.uses[rows] += 1
        self.table.last_used[rows] = update

    def retire(self, update: int) -> int:
        """Drops the entries that no limit will ever let through again; returns their number."""
        table, limits = self.table, self.limits
        gone = np.zeros(len(table), bool)
        if limits.max_age is not None:
            gone |= update - table.step > limits.max_age
        if limits.max_uses is not None:
            gone |= table.uses >= limits.max_uses
        return self._forget(np.flatnonzero(gone))

    def _forget(self, rows: Sequence[int] | Ints) -> int:
        index = np.asarray(rows, dtype=np.int64)
        for serial in self._here.intersection(self.table.serial[index].tolist()):
            self.storage.remove(serial)
            self._here.discard(serial)
        self.table.remove(index)
        return len(index)


def _lowest_ranks(ranks: NDArray[Any], serials: Ints, count: int) -> Ints:
    """Rows of the `count` lowest ranks; among equal ranks at the border the lowest serials, that is the older."""
    border = np.partition(ranks, count - 1)[count - 1]
    below = np.flatnonzero(ranks < border)
    ties = np.flatnonzero(ranks == border)
    older = ties[lowest(serials[ties].astype(np.float64), count - len(below))]
    return np.concatenate([below, older])
