"""What is kept: a table of metadata, the payloads, and how much of both there is room for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.text import format_bytes
from ..data.fields import PIXELS
from ..data.table import CORE, Table, lowest
from ..data.types import NONE, Bools, Group, GroupKind, Ints, Packed
from ..serialization.groups import unpack

FEW_KINDS = 64
"""So many kinds are kept without an entry."""


class Store:
    """Entries of up to `capacity` groups, and the payload of those that live on this process.

    Attributes:
        table ([`Table`]): The metadata columns.
        capacity (`int`): Groups (not rows, not tokens) that are kept.
        max_bytes (`int`, *optional*): Most bytes of payload and table rows.
    """

    def __init__(self, capacity: int, max_bytes: int | None = None, size: int = 1) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.table = Table.empty(size)
        self._keysets: list[frozenset[str]] = []
        self._kinds: dict[GroupKind, GroupKind] = {}  # one object for all entries of a kind
        self._kind_of: list[GroupKind | None] = []  # by row of the table, as the payload
        self._payload: list[bytes | None] = []
        self._bytes = 0
        self._has_warned = False

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, and the used rows of all columns, with what Python needs for an entry."""
        return self._bytes + len(self.table) * self.table.row_bytes

    def keyset(self, keys: frozenset[str]) -> int:
        """The number that stands for `keys` in the table's column of that name."""
        if keys not in self._keysets:
            self._keysets.append(keys)
        return self._keysets.index(keys)

    def append(self, columns: Mapping[str, NDArray[Any]], rng: np.random.Generator) -> Ints:
        """Put newcomers' columns into the table, whatever room there is; `tag` is drawn here. Return their rows."""
        count, first = len(columns["serial"]), len(self.table)
        tags = 1.0 - rng.random(count)  # in (0, 1]: log(tag) is finite
        self._append({**columns, "tag": tags}, count)
        return np.arange(first, first + count)

    def evict(self, rank: Callable[[Table], NDArray[Any]], drops: bool = False) -> int:
        """Let the lowest keep ranks leave until the rest fits, and of equal ranks the older; return how many left.

        Args:
            rank (`Callable`): Maps the table to keep ranks.
            drops (`bool`): Whether a keep rank of -inf lets an entry leave where there is room.
        """
        table = self.table
        excess = max(len(table) - self.capacity, 0)
        costs, over = None, 0
        if self.max_bytes is not None:
            costs = table.nbytes + table.row_bytes
            over = int(costs.sum()) - self.max_bytes
        if not (excess or over > 0 or (drops and len(table))):
            return 0
        ranks = rank(table)
        if drops:
            excess = max(excess, int(np.isneginf(ranks).sum()))
        leave = lowest(ranks, table.serial, excess)  # of equal ranks the older
        if costs is not None and costs[leave].sum() < over:
            self._warn_of_bytes(costs)
            order = lowest(ranks, table.serial, len(table))
            leave = order[: int(np.argmax(np.cumsum(costs[order]) >= over)) + 1]
        return self.forget(leave)

    def fits(self, nbytes: Ints) -> Bools:
        """Tell whether groups of `nbytes` payload would fit into the buffer alone."""
        most = np.inf if self.max_bytes is None else self.max_bytes - self.table.row_bytes
        return np.asarray(nbytes <= most)

    def load(self, serial: int) -> Group:
        """A fresh copy of payload that is on this process."""
        return unpack(self.read(serial))

    def read(self, serial: int) -> Packed:
        """Payload that is on this process, as it is kept."""
        row = self.table.rows_of([serial])[0]
        held, kind = (None, None) if row == NONE else (self._payload[row], self._kind_of[row])
        if held is None or kind is None:
            raise KeyError(serial)
        return Packed(kind, held)

    def _warn_of_bytes(self, costs: Ints) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        mean = format_bytes(float(costs.mean()))
        warnings.warn(
            f"replay_max_bytes is reached with {len(costs) - 1} of replay_buffer_size={self.capacity} groups, and "
            f"evicts from now on. A group costs {mean} on average.",
            stacklevel=2,
        )

    def held(self) -> list[int]:
        """Serials of the entries whose payload is on this process, in the order of the table."""
        serials = self.table.serial.tolist()
        return [serial for serial, held in zip(serials, self._payload, strict=True) if held is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, payload apart: copies of the table's `columns`, and `keysets`, sets of
        batch keys that its column `keys` counts in."""
        columns = {name: getattr(self.table, name).copy() for name in self.table.names}
        return {"columns": columns, "keysets": list(self._keysets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave in the place of its own entries; the payload that belongs here follows by
        `receive`.

        Columns of plugins that are absent now are left out, and new plugins' columns get their fill.

        Raises:
            KeyError: One of the table's own columns is missing.
        """
        self.forget(np.arange(len(self)))
        columns = state["columns"]
        renumbered = [self.keyset(keys) for keys in state["keysets"]]
        numbers = np.array(renumbered, np.int64)
        known = {name: columns[name] for name in self.table.names if name in CORE or name in columns}
        known["keys"] = numbers[columns["keys"]]
        self._append(known, len(columns["serial"]))

    def _append(self, columns: Mapping[str, NDArray[Any]], count: int) -> None:
        self.table.append(columns, count)
        self._payload += [None] * count
        self._kind_of += [None] * count

    def payload(self) -> Iterator[tuple[int, Packed]]:
        """`(serial, packed group)` of those that are `held`."""
        return ((serial, self.read(serial)) for serial in self.held())

    def receive(self, payload: Mapping[int, Packed]) -> None:
        """Put away the payload that lives on this process, by serial, of entries that stand in the table."""
        rows = self.table.rows_of(list(payload)).tolist()
        for row, (kind, data) in zip(rows, payload.values(), strict=True):
            if row != NONE:
                self._bytes += len(data) - self._size_of(row)
                self._payload[row], self._kind_of[row] = data, self._kinds.setdefault(kind, kind)

    def _size_of(self, row: int) -> int:
        held = self._payload[row]
        return 0 if held is None else len(held)

    def withdraw(self, serials: Sequence[int]) -> int:
        """Take back entries whose payload will not come or has no place; return their number."""
        if not len(serials):
            return 0
        rows = self.table.rows_of(serials)
        return self.forget(np.unique(rows[rows >= 0]))

    def unrestorable(self, keys: frozenset[str]) -> dict[str, Bools]:
        """Return the entries that a batch with these keys can't take, by reason. `pixel_values` among the keys means
        that it can take groups with images; those without fit in any batch."""
        needed, kinds = keys - {PIXELS}, [*enumerate(self._keysets)]
        unfit = {
            "lacks a tensor": [number for number, have in kinds if not needed <= have],
            "has images, the batch none": [number for number, have in kinds if PIXELS in have - keys],
        }
        return {reason: np.isin(self.table.keys, numbers) for reason, numbers in unfit.items() if numbers}

    def forget(self, rows: Sequence[int] | Ints) -> int:
        """Drop the entries in these rows; return their number."""
        index = np.asarray(rows, dtype=np.int64)
        if len(index) == 0:
            return 0
        for row in index.tolist():
            self._bytes -= self._size_of(row)
        for gap, row in self.table.remove(index):
            self._payload[gap], self._kind_of[gap] = self._payload[row], self._kind_of[row]
        del self._payload[len(self) :], self._kind_of[len(self) :]
        if len(self._kinds) > 2 * len(self) + FEW_KINDS:  # as with images, of which each has a size of its own
            self._kinds = {kind: kind for kind in self._kind_of if kind is not None}
        return len(index)
