"""The decisions of one step, before anything moves: the same on all processes that share a buffer. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .counters import Tally
from .protocols import Arrival
from .types import Bools, Floats, Group, Groups, Ints

RUNS, PAUSED, DETACHED = range(3)
"""States of replay on a process: all must have the same."""


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
class Taken:
    """Rows of one slot that rows of one entry take; as a rule all of them.

    Attributes:
        slot (`int`): Index among the groups that the scope shares.
        serial (`int`): The entry's serial number.
        row (`int`): Its row in the table.
        age (`int`): Updates since it was generated.
        priority (`float`): Its chance to be drawn first, relative to that of the least likely entry.
        targets (`(r,)` int64): Rows of the slot, ascending.
        sources (`(r,)` int64): The entry's rows that take them.
    """

    slot: int
    serial: int
    row: int
    age: int
    priority: float
    targets: Ints
    sources: Ints

    @property
    def is_whole(self) -> bool:
        """Tells whether every row of the entry takes the row of its number."""
        return np.array_equal(self.targets, self.sources) and np.array_equal(
            self.targets, np.arange(len(self.targets))
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """Entries drawn for slots, the same on all processes that share the buffer.

    Attributes:
        taken (`list[Taken]`): Slot by slot in the selector's order; no entry twice.
    """

    taken: list[Taken] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        """Slots in which something was put, in order."""
        return list(dict.fromkeys(taken.slot for taken in self.taken))

    @property
    def serials(self) -> list[int]:
        """The entries' serial numbers."""
        return [taken.serial for taken in self.taken]


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Advantages and masks of all rows of the composed batch, `(n, G)` each, over the groups that the scope shares.

    Attributes:
        advantages (float64): 0 for masked rows.
        masked (bool): Rows that train nothing, and are out of the loss's denominators.
        computed (bool): Rows whose advantages were computed anew, in a mixed group: neither the batch nor the payload
            holds them.
    """

    advantages: Floats
    masked: Bools
    computed: Bools

    @classmethod
    def of_fresh(cls, fresh: Groups) -> RowOutcome:
        """The fresh rows train as they are."""
        return cls(fresh.advantages, fresh.masked, np.zeros(fresh.masked.shape, bool))

    def take(self, slots: Ints) -> RowOutcome:
        """Each slot trains with the rows of the slot that `slots`, `(n,)`, names for it."""
        return RowOutcome(self.advantages[slots], self.masked[slots], self.computed[slots])


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of one step: who comes into the buffer, and what leaves it for slots.

    Attributes:
        tally ([`Tally`]): What was counted on the way.
        admitted ([`Admitted`]): Newcomers whose payload is to be moved into the buffer.
        sampled ([`Sampled`]): Entries whose payload is to be moved into slots.
    """

    tally: Tally = field(default_factory=Tally)
    admitted: Admitted = field(default_factory=Admitted)
    sampled: Sampled = field(default_factory=Sampled)

    def numbers(self) -> list[Any]:
        """Lists of all that must be the same on processes that share the buffer."""
        lists: list[Any] = [self.admitted.serials, self.sampled.slots, self.sampled.serials]
        for taken in self.sampled.taken:
            lists += [taken.targets, taken.sources]
        return lists
