"""What one step decides, before anything moves: the same on all processes that share a buffer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .counters import Tally
from .protocols import Arrival
from .types import Group, Groups

RUNS, PAUSED, DETACHED = range(3)
"""What replay does on a process: all must do the same."""


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
    """Entries drawn for slots, the same on all processes that share the buffer; the lists run in parallel.

    Attributes:
        slots (`list[int]`): What is filled, in the selector's order.
        serials (`list[int]`): The entries' serial numbers.
        ages (`list[int]`): Updates since each was generated.
        rows (`list[int]`): Their rows in the table.
        priorities (`list[float]`): Chance of each to be drawn first, relative to that of the least likely one.
    """

    slots: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    priorities: list[float] = field(default_factory=list)

    @property
    def by_slot(self) -> dict[int, int]:
        """Serial number of the entry in each slot."""
        return dict(zip(self.slots, self.serials, strict=True))


@dataclass(slots=True)
class Plan:
    """All that is decided for one generation batch.

    Attributes:
        tally ([`Tally`]): What is counted on the way.
        fresh ([`Groups`], *optional*): The fresh groups; None at the end of training.
        admitted ([`Admitted`]): Newcomers whose payload is to be moved into the buffer.
        sampled ([`Sampled`]): Entries whose payload is to be moved into slots.
        copies (`list[tuple[int, int]]`): (dead slot, live slot of the same batch that is copied there).
        candidates (`list[int]`): Slots of the live groups that are to be stored once their log-probs are known.
        error (`Exception`, *optional*): The first that happened on this process.
        mode (`int`): `RUNS`, `PAUSED` or `DETACHED`.
    """

    tally: Tally = field(default_factory=Tally)
    fresh: Groups | None = None
    admitted: Admitted = field(default_factory=Admitted)
    sampled: Sampled = field(default_factory=Sampled)
    copies: list[tuple[int, int]] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    error: Exception | None = None
    mode: int = RUNS

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """What fails inside is kept, for `agree` to raise on all processes; an earlier error stays."""
        try:
            yield
        except Exception as caught:
            self.error = self.error or caught
