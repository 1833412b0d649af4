"""What was decided for one generation batch, and which payload has to move for it. No communication happens here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocols import Arrival, Request
from .types import Group, Ints, Placement


@dataclass(frozen=True, slots=True)
class Admission:
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
class Draw:
    """Entries drawn for slots, the same on all processes that share the buffer; the lists run in parallel."""

    slots: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class Rows:
    """Where the rows of one generation batch lie: the columns that a scope shared, and this process's part of them.

    Attributes:
        columns (`Mapping[str, NDArray]`): As shared, over all rows that share a buffer.
        size (`int`): Rows of a group.
        count (`int`): Rows of each process.
        first (`int`): Index of this process's first row among those of all processes.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]], local: Mapping[str, NDArray[Any]], size: int) -> None:
        self.columns = columns
        self.size = size
        self.count = len(local["row"])
        self.first = int(local["row"][0])

    @property
    def leads(self) -> bool:
        """Whether this process is the first of those that share a buffer."""
        return self.first == int(self.columns["row"][0])

    def span(self, slot: int) -> range:
        """Indices of the slot's rows among those of all processes."""
        begin = int(self.columns["row"][slot * self.size])
        return range(begin, begin + self.size)

    def local(self, slot: int) -> tuple[slice, int]:
        """The slot's rows in this process's batch (empty if it has none), and which row of the group comes first."""
        span = self.span(slot)
        begin, end = max(span.start, self.first), min(span.stop, self.first + self.count)
        if begin >= end:
            return slice(0, 0), 0
        return slice(begin - self.first, end - self.first), begin - span.start

    def arrivals(self, serials: Sequence[int], slots: Sequence[int], ranks: int) -> list[Arrival]:
        """Candidates as arrivals, from the shared column `nbytes`."""
        owners, nbytes = self.columns["row"] // self.count, self.columns["nbytes"]
        arrivals = []
        for serial, slot in zip(serials, slots, strict=True):
            rows = slice(slot * self.size, (slot + 1) * self.size)
            sizes: Ints = np.zeros(ranks, np.int64)
            np.add.at(sizes, owners[rows], nbytes[rows])
            arrivals.append(Arrival(serial, sizes))
        return arrivals

    def requests(self, draw: Draw, owners: Ints) -> list[Request]:
        """Who needs what was drawn; `owners` is the table's column."""
        spans = [self.span(slot) for slot in draw.slots]
        ranks = [tuple(range(span.start // self.count, (span.stop - 1) // self.count + 1)) for span in spans]
        held = owners[draw.rows].tolist()
        return [Request(*request) for request in zip(draw.serials, held, ranks, strict=True)]

    def placements(self, draw: Draw, groups: Mapping[int, Group]) -> list[Placement]:
        """What was drawn for slots with rows on this process."""
        placements = []
        for slot, serial, age in zip(draw.slots, draw.serials, draw.ages, strict=True):
            rows, first = self.local(slot)
            if rows.stop:
                placements.append(
                    Placement(slot, groups[serial], serial, age, rows.start, first, rows.stop - rows.start)
                )
        return placements
