"""What processes decide, and where the rows of a batch and of stored groups lie."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..batch.group_view import TOLD_ITEMS
from ..data.counters import Tally
from ..data.fields import PIXELS
from ..data.plan import Plan
from ..data.table import Table
from ..data.types import NONE, Group, Ints, Packed, Placement
from ..errors import BatchError, SeamError
from ..protocols import Arrival, Request


@dataclass(frozen=True, slots=True)
class Admitted:
    """New entries that the table has accepted.

    Attributes:
        arrivals (`list[Arrival]`): All of them, the same on all processes that share the buffer.
        mine (`dict[int, Packed]`): This process's rows of them, by serial.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    mine: dict[int, Packed] = field(default_factory=dict)

    @property
    def serials(self) -> list[int]:
        """Their serial numbers."""
        return [arrival.serial for arrival in self.arrivals]


@dataclass(frozen=True, slots=True)
class Decision:
    """All that is decided about one batch.

    Attributes:
        tally ([`Tally`]): What was counted on the way.
        admitted ([`Admitted`]): Newcomers whose payload is to be moved into the buffer.
        plan ([`Plan`]): What every row trains on.
        priorities (`dict[int, float]`): Of each entry of the plan, its chance to be drawn first relative to that of
            the least likely eligible entry; 1 where it is not given.
        candidates (`list[int]`): Slots of the live groups that are to be stored once their log-probs are known.
    """

    tally: Tally = field(default_factory=Tally)
    admitted: Admitted = field(default_factory=Admitted)
    plan: Plan = field(default_factory=Plan.nothing)
    priorities: dict[int, float] = field(default_factory=dict)
    candidates: list[int] = field(default_factory=list)


_Value = TypeVar("_Value", bound=np.generic)
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without whole parts, are spread over 0 to 1: no two rows count alike."""
NO_LENGTHS: Ints = np.empty(0, np.int64)
MISSING = Group({}, frozenset(), NO_LENGTHS, NO_LENGTHS)
"""Travels in the place of a group that its owner failed to give out, so that nobody waits for it."""


class Exchange(NamedTuple):
    """A fresh group that replaces another group, with rows on this process."""

    slot: int
    """Among the groups that the scope shares."""
    target: slice
    """The slot's rows in this process's batch."""
    source: slice
    """The rows of the group that takes it, in the batch that it comes from."""

    def placement(self, group: Group) -> Placement:
        """Place the group, once it is cut out, in its slot."""
        count = self.target.stop - self.target.start
        return Placement(self.slot, group, NONE, age=0, start=self.target.start, count=count)


class RowLayout:
    """The layout of a generation batch's rows: the columns that a scope shared, and this process's part of them.

    Attributes:
        columns (`Mapping[str, NDArray]`): As shared, over all rows that share a buffer.
        size (`int`): Rows of a group.
        count (`int`): Rows of each process.
        first (`int`): Index of this process's first row among those of all processes.
        told_items (`int`, *optional*): `num_items_in_batch`, as it was scored.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]], local: Mapping[str, NDArray[Any]], size: int) -> None:
        self.columns = columns
        self.size = size
        self.count = len(local["row"])
        self.first = int(local["row"][0])
        self.told_items = int(local[TOLD_ITEMS][0]) if TOLD_ITEMS in local else None

    @property
    def leader(self) -> int:
        """The first of the processes that share this buffer."""
        return int(self.columns["row"][0]) // self.count

    @property
    def leads(self) -> bool:
        """Tell whether this process is the first of those that share a buffer."""
        return self.first == int(self.columns["row"][0])

    def check(self, scored: int, processes: int) -> None:
        """Check that groups are whole and in order, and that every row that was scored is there.

        Args:
            scored (`int`): Rows of all processes whose rewards are known.
            processes (`int`): How many there are.

        Raises:
            SeamError: The scope shares parts of groups, or the trainer's batch does not hold what it scored.
        """
        if scored != self.count * processes:
            raise SeamError(
                f"The batch holds {self.count} rows per process, but {scored} rows on {processes} process(es) have "
                "rewards: replay does not support a trainer that drops or adds rows after scoring them. Mask rows "
                "instead: return NaN for them from a plugin's trl_replay_advantages."
            )
        rows: Ints = self.columns["row"]
        if not self._are_whole_groups(rows):
            first = rows.min()
            last = rows.max()
            raise SeamError(
                f"The scope shares rows {first} to {last}, which are not whole groups of {self.size}: with "
                f"{self.count} rows per process, groups straddle processes. Use a scope that assembles them "
                "(gathered), or another batch size."
            )

    def _are_whole_groups(self, rows: Ints) -> bool:
        if len(rows) % self.size:
            return False
        groups = rows.reshape(-1, self.size)
        first_of_group = groups[:, :1] // self.size * self.size
        return bool((groups == first_of_group + np.arange(self.size)).all())

    def fingerprint(self, table: Table, decision: Decision) -> int:
        """Return a 48-bit hash of the buffer's decisions; 0 if this process shares its buffer with none.

        Equal on all processes that share a buffer, or payload would go astray. It holds no advantages, which may
        differ in their last bits between machines: see `sums_of_advantages`.
        """
        if len(self.columns["row"]) == self.count:
            return 0
        plan = decision.plan
        entries = np.where(plan.stored, _serials(table, plan.entry), plan.entry)
        hashed = hashlib.blake2b(np.sort(table.serial).tobytes(), digest_size=6)
        for column in (np.array(decision.admitted.serials, np.int64), entries, *plan.decided()):
            hashed.update(np.int64(column.size).tobytes() + column.tobytes())
        return int.from_bytes(hashed.digest(), "little")

    def sums_of_advantages(self, plan: Plan) -> tuple[float, float]:
        """Return two numbers that are nearly equal on all processes that share a buffer: the sum of the advantages of
        all its rows, each times another number from 1 to 2, and that of their sizes; 0 where nobody shares it."""
        if len(self.columns["row"]) == self.count:
            return 0.0, 0.0
        given = plan.advantages.ravel()
        factors = 1.0 + np.arange(len(given)) * GOLDEN % 1.0
        return float(factors @ given), float(np.abs(given).sum())

    def takes(self, keys: frozenset[str]) -> frozenset[str]:
        """Batch keys that a group needs to fill any slot: `keys`, and that of images if all batches have some."""
        fewest = int(self.columns["images"].min())
        return keys | {PIXELS} if fewest >= 0 else keys

    def holds(self, keys: frozenset[str], slot: int) -> frozenset[str]:
        """Batch keys that the slot's group can restore: `keys`, and that of images if it has one."""
        images = self.columns["images"][slot * self.size : (slot + 1) * self.size]
        return keys | {PIXELS} if int(images.max()) > 0 else keys

    def span(self, slot: int) -> range:
        """Indices of the slot's rows among those of all processes."""
        begin = int(self.columns["row"][slot * self.size])
        return range(begin, begin + self.size)

    def local(self, slot: int) -> tuple[slice, int]:
        """The slot's rows in this process's batch (empty if it has none), and which row of the group comes first."""
        span = self.span(slot)
        begin = max(span.start, self.first)
        end = min(span.stop, self.first + self.count)
        if begin >= end:
            return slice(0, 0), 0
        rows = slice(begin - self.first, end - self.first)
        return rows, begin - span.start

    def exchanges(self, slots: Sequence[int], groups: Sequence[int], other: RowLayout) -> list[Exchange]:
        """Return the groups of this or another batch that take slots and have rows on this process."""
        found = []
        for slot, group in zip(slots, groups, strict=True):
            target, _ = self.local(slot)
            source, _ = other.local(group)
            if target.stop:
                found.append(Exchange(slot, target, source))
        return found

    @property
    def here(self) -> slice:
        """This process's rows among those that are shared."""
        begin = self.first - int(self.columns["row"][0])
        return slice(begin, begin + self.count)

    @property
    def ranks_of_slots(self) -> Ints:
        """The process that has all rows of each slot, `(n,)`; -1 if they straddle."""
        first = self.columns["row"][:: self.size]
        last = (first + self.size - 1) // self.count
        return np.where(first // self.count == last, last, -1)

    def arrivals(self, serials: Sequence[int], slots: Sequence[int], ranks: int) -> list[Arrival]:
        """Return the candidates as arrivals, from the shared column `nbytes`."""
        chosen = list(slots)
        nbytes = self.columns["nbytes"].reshape(-1, self.size)[chosen]
        ranks_of_rows = self.columns["row"] // self.count
        owners = ranks_of_rows.reshape(-1, self.size)[chosen]
        number = np.arange(len(chosen))[:, None]
        sizes = np.zeros((len(chosen), ranks), np.int64)
        np.add.at(sizes, (number, owners), nbytes)
        return [Arrival(serial, of_ranks) for serial, of_ranks in zip(serials, sizes, strict=True)]

    def sizes(self, slots: Sequence[int]) -> list[int]:
        """Bytes of payload of the candidates in `slots`."""
        if not slots:
            return []
        by_group = self.columns["nbytes"].reshape(-1, self.size)
        sizes: list[int] = by_group[list(slots)].sum(axis=1).tolist()
        return sizes

    def requests(self, plan: Plan, table: Table) -> list[Request]:
        """List which ranks need the rows of which entry."""
        requests = []
        serials, owners, ranks_of_rows = table.serial, table.owner, self.columns["row"] // self.count
        for entry, rows in plan.drawn():
            ranks = sorted(set(ranks_of_rows[rows].tolist()))
            requests.append(Request(int(serials[entry]), int(owners[entry]), tuple(ranks)))
        return requests

    def of_here(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Slice values of all shared rows, `(n, G)`, to this process's rows, `(count,)`."""
        return values.ravel()[self.here]

    @property
    def slots_here(self) -> slice:
        """Slots with rows on this process."""
        return slice(self.here.start // self.size, -(-self.here.stop // self.size))

    def placements(
        self, decision: Decision, table: Table, update: int, groups: Mapping[int, Group]
    ) -> list[Placement]:
        """Place stored rows on this process, in runs of adjacent ones.

        Args:
            decision ([`Decision`]): With the plan.
            table ([`Table`]): The buffer's.
            update (`int`): Updates done.
            groups (`Mapping[int, Group]`): By serial, the rows of each entry that the plan names, in its order.

        Raises:
            BatchError: A group did not come.
        """
        placements = []
        serials, updates, here = table.serial, table.update, self.here
        for entry, rows in decision.plan.drawn():
            runs: list[list[int]] = []  # the first row, its number among the entry's rows, and how many follow it
            for number, row in enumerate(rows.tolist()):
                if not here.start <= row < here.stop:
                    continue
                if runs and row == runs[-1][0] + runs[-1][2] and row % self.size:
                    runs[-1][2] += 1
                else:
                    runs.append([row, number, 1])
            serial = int(serials[entry])
            if runs and not groups[serial].keys:
                raise BatchError(f"The stored group {serial} can't be replayed: its owner could not load it.")
            for row, number, count in runs:
                placed = Placement(
                    slot=row // self.size,
                    group=groups[serial],
                    serial=serial,
                    age=update - int(updates[entry]),
                    start=row - here.start,
                    first=number,
                    count=count,
                    priority=decision.priorities.get(entry, 1.0),
                )
                placements.append(placed)
        return placements


def _serials(table: Table, entries: Ints) -> Ints:
    """Return the serial of each entry; arbitrary where there is none."""
    if not len(table):
        return entries
    return np.asarray(table.serial[np.maximum(entries, 0)])
