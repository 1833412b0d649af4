"""The decisions of one step before payload moves, equal on all processes that share a buffer. Imports no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from ..data.counters import Tally
from ..data.plan import Plan
from ..data.types import Group
from ..protocols import Arrival

RUNS, PAUSED, DETACHED = range(3)
"""States of replay on a process: all must have the same."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """New entries that the table has accepted.

    Attributes:
        arrivals (`list[Arrival]`): All of them, the same on all processes that share the buffer.
        mine (`dict[int, Group]`): This process's rows of them, by serial.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    mine: dict[int, Group] = field(default_factory=dict)

    def within(self, serials: Container[int]) -> Admitted:
        """Return those of them that the table still has."""
        arrivals = [arrival for arrival in self.arrivals if arrival.serial in serials]
        return Admitted(arrivals, {serial: group for serial, group in self.mine.items() if serial in serials})

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
