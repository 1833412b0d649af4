"""What was decided for one generation batch, and which payload has to move for it. No communication happens here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.compose import cut
from ..errors import BatchError, SeamError
from ..fields import PIXELS, FieldTable
from ..protocols import Agreement, Arrival, Request
from ..table import Table
from ..types import Batch, Floats, Group, Ints, Placement

MISSING = Group({}, frozenset(), np.empty(0, np.int64), np.empty(0, np.int64))
"""Travels in the place of a group that its owner's storage failed to give out, so that nobody waits for it."""


WORD = 48
"""Bits that travel in one float64, which holds whole numbers of up to 53 bits."""
BITS = 2.0 ** np.arange(WORD)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Newcomers that the table has taken.

    Attributes:
        arrivals (`list[Arrival]`): All of them, the same on all processes that share the buffer.
        mine (`dict[int, Group]`): This process's rows of them, by serial.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    mine: dict[int, Group] = field(default_factory=dict)

    @property
    def serials(self) -> list[int]:
        """Their serial numbers."""
        return [arrival.serial for arrival in self.arrivals]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Entries drawn for slots, the same on all processes that share the buffer; the lists run in parallel."""

    slots: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    priorities: list[float] = field(default_factory=list)


class RowLayout:
    """Where the rows of one generation batch lie: the columns that a scope shared, and this process's part of them.

    Attributes:
        columns (`Mapping[str, NDArray]`): As shared, over all rows that share a buffer.
        size (`int`): Rows of a group.
        count (`int`): Rows of each process.
        first (`int`): Index of this process's first row among those of all processes.
    """

    def __init__(
        self,
        columns: Mapping[str, NDArray[Any]],
        local: Mapping[str, NDArray[Any]],
        size: int,
    ) -> None:
        self.columns = columns
        self.size = size
        self.count = len(local["row"])
        self.first = int(local["row"][0])

    @property
    def leads(self) -> bool:
        """Whether this process is the first of those that share a buffer."""
        return self.first == int(self.columns["row"][0])

    def check(self, scored: int, processes: int) -> None:
        """Groups must be whole and in order, and every row that was scored must be there.

        Args:
            scored (`int`): Rows of all processes whose rewards are known.
            processes (`int`): How many there are.

        Raises:
            SeamError: The scope shares parts of groups, or the trainer's batch does not hold what it scored.
        """
        if scored != self.count * processes:
            raise SeamError(
                f"The batch holds {self.count} rows a process, and rewards of {scored} rows on {processes} "
                "process(es) are known: a trainer that drops or adds rows after scoring them can't be replayed for."
            )
        rows: Ints = self.columns["row"]
        groups = rows[: len(rows) // self.size * self.size].reshape(-1, self.size)
        if len(rows) % self.size or (groups != groups[:, :1] // self.size * self.size + np.arange(self.size)).any():
            raise SeamError(
                f"The scope shares rows {rows.min()} to {rows.max()}, which are not whole groups of {self.size}: with "
                f"{self.count} rows a process groups straddle processes. Use a scope that puts them together "
                "(gathered, sharded), or another batch size."
            )

    def identity(self, table: Table, admitted: Admitted, sampled: Sampled) -> Floats:
        """`(2,)`: the first of the processes that share this buffer, and a 48-bit hash of what was decided for it.

        Equal on all processes that share a buffer, or payload would go astray.
        """
        decided: list[Any] = [
            table.serial,
            admitted.serials,
            sampled.slots,
            sampled.serials,
        ]
        numbers = np.concatenate([np.append(len(part), np.asarray(part, np.int64)) for part in decided])
        digest = hashlib.blake2b(numbers.tobytes(), digest_size=6).digest()
        return np.array(
            [
                int(self.columns["row"][0]) // self.count,
                int.from_bytes(digest, "little"),
            ],
            np.float64,
        )

    def takes(self, keys: frozenset[str]) -> frozenset[str]:
        """`keys`, and that of images if the batches of all processes hold some."""
        return keys | {PIXELS} if int(self.columns["images"].min()) >= 0 else keys

    def holds(self, keys: frozenset[str], slot: int) -> frozenset[str]:
        """`keys`, and that of images if the slot's group has one."""
        rows = self.columns["images"][slot * self.size : (slot + 1) * self.size]
        return keys | {PIXELS} if int(rows.max()) > 0 else keys

    def span(self, slot: int) -> range:
        """Indices of the slot's rows among those of all processes."""
        begin = int(self.columns["row"][slot * self.size])
        return range(begin, begin + self.size)

    def local(self, slot: int) -> tuple[slice, int]:
        """The slot's rows in this process's batch (empty if it has none), and which row of the group comes first."""
        span = self.span(slot)
        begin, end = (
            max(span.start, self.first),
            min(span.stop, self.first + self.count),
        )
        if begin >= end:
            return slice(0, 0), 0
        return slice(begin - self.first, end - self.first), begin - span.start

    def home(self, slot: int) -> int | None:
        """The process that has all rows of the slot; None if they straddle."""
        span = self.span(slot)
        first, last = span.start // self.count, (span.stop - 1) // self.count
        return first if first == last else None

    def arrivals(self, serials: Sequence[int], slots: Sequence[int], ranks: int) -> list[Arrival]:
        """Candidates as arrivals, from the shared column `nbytes`."""
        owners, nbytes = (
            self.columns["row"] // self.count,
            self.columns["nbytes"],
        )
        arrivals = []
        for serial, slot in zip(serials, slots, strict=True):
            rows = slice(slot * self.size, (slot + 1) * self.size)
            sizes: Ints = np.zeros(ranks, np.int64)
            np.add.at(sizes, owners[rows], nbytes[rows])
            arrivals.append(Arrival(serial, sizes))
        return arrivals

    def sizes(self, slots: Sequence[int]) -> list[int]:
        """Bytes of payload of the candidates in `slots`: what their parts take when packed, and their lengths."""
        packed = self.columns["nbytes"].reshape(-1, self.size).sum(axis=1)
        return (packed[list(slots)] + 2 * 8 * self.size).tolist() if slots else []

    def overflowed(self) -> list[int]:
        """Serials of the groups that some process's storage had no room for."""
        overflow = self.columns["overflow"]
        return sorted(set((overflow[overflow > 0] - 1).tolist()))

    def requests(self, sampled: Sampled, owners: Ints) -> list[Request]:
        """Who needs what was drawn; `owners` is the table's column."""
        spans = [self.span(slot) for slot in sampled.slots]
        ranks = [tuple(range(span.start // self.count, (span.stop - 1) // self.count + 1)) for span in spans]
        held = owners[sampled.rows].tolist()
        return [Request(*request) for request in zip(sampled.serials, held, ranks, strict=True)]

    def filled(self, sampled: Sampled) -> Floats:
        """Which rows of this process something was drawn for, as numbers of `WORD` bits each: see `unpacked`."""
        bits = np.zeros((-(-self.count // WORD), WORD))
        for slot in sampled.slots:
            bits.ravel()[self.local(slot)[0]] = 1
        return np.asarray(bits @ BITS)

    def placements(self, sampled: Sampled, groups: Mapping[int, Group]) -> list[Placement]:
        """What was drawn for slots with rows on this process.

        Raises:
            BatchError: A group did not come.
        """
        placements = []
        for slot, serial, age, priority in zip(
            sampled.slots,
            sampled.serials,
            sampled.ages,
            sampled.priorities,
            strict=True,
        ):
            rows, first = self.local(slot)
            if rows.stop:
                if not groups[serial].keys:
                    raise BatchError(f"The stored group {serial} can't be replayed: its owner could not load it.")
                placements.append(
                    Placement(
                        slot,
                        groups[serial],
                        serial,
                        age,
                        rows.start,
                        first,
                        rows.stop - rows.start,
                        priority,
                    )
                )
        return placements


def unpacked(words: Floats, count: int) -> list[bool]:
    """Which rows of all processes something was drawn for, in their order.

    Args:
        words (`(ranks, numbers)`): Every rank's [`RowLayout.filled`].
        count (`int`): Rows of each process.
    """
    bits = words.astype(np.int64)[:, :, None] // BITS.astype(np.int64) % 2
    mask: list[bool] = bits.reshape(len(words), -1)[:, :count].ravel().astype(bool).tolist()
    return mask


def reason_to_stop(agreement: Agreement, counters: int) -> str:
    """Why all processes must stop, in words that are the same on all of them; empty if they need not.

    Args:
        agreement ([`Agreement`]): Of vectors that hold `counters` numbers, then [`RowLayout.identity`], and then
            others.
        counters (`int`): How many numbers come first.
    """
    failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(agreement.errors) if text)
    identities = agreement.vectors[:, counters : counters + 2]
    if failed or len(np.unique(identities, axis=0)) == len(np.unique(identities[:, 0])):
        return failed
    return (
        "Processes that share a buffer decided differently. Strategies must do the same on every rank and draw from "
        "context.rng only; clear and pause a session on all ranks."
    )


def duplicates(
    batch: Batch,
    rows: RowLayout,
    pairs: Sequence[tuple[int, int]],
    fields: FieldTable,
) -> list[Placement]:
    """This process's live groups that are copied into dead groups' slots; serial -1, since they are no entries.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`RowLayout`]): Where the groups lie.
        pairs (`Sequence`): `(dead slot, live slot)` of all processes that share the buffer.
        fields ([`FieldTable`]): How to cut each key.
    """
    here = [(rows.local(dead)[0], rows.local(live)[0], dead) for dead, live in pairs if rows.local(dead)[0].stop]
    groups = cut(batch, fields.exact(), [live for _, live, _ in here])
    return [
        Placement(slot, group, -1, 0, dead.start, 0, dead.stop - dead.start)
        for (dead, _, slot), group in zip(here, groups, strict=True)
    ]
