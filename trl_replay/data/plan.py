"""The plan of a batch: one table of what each row trains on, which strategies and plugins edit in turn. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .types import LARGEST_ADVANTAGE, NONE, Bools, Floats, Groups, Ints

Found = TypeVar("Found")
FRESH = NONE
"""In [`Plan.entry`]: the fresh row itself."""
EMPTY = -2
"""In [`Plan.entry`]: the masked placeholder of a slot of a further iteration that nothing fills."""
EDITABLE = {"advantages": np.float64, "masked": np.bool_, "silent": np.bool_, "kl": np.bool_}
"""Columns that a plugin may change, and their types."""
TABLE = ("entry", "source", *EDITABLE, "_reshaped")
"""All columns of a plan."""


def _of_entry(find: Callable[[Plan], Found]) -> Callable[[Plan], Found]:
    """What follows from `plan.entry` alone, found once for each."""

    @wraps(find)
    def found(plan: Plan) -> Found:
        if plan._known[0] is not plan.entry:
            plan._known = plan.entry, {}
        known: dict[Any, Found] = plan._known[1]
        if find not in known:
            known[find] = find(plan)
        return known[find]

    return found


@dataclass(slots=True, eq=False)
class Plan:
    """What the rows of `n` groups train on, as `(n, G)` columns over the groups that the scope shares; equal on all
    its processes.

    A plugin may set `masked` and `silent`, clear `kl`, and change `advantages`. Nothing is taken back.

    Attributes:
        entry (int64): `FRESH` for the fresh row; `e >= 0` for a row of entry `e` of the table; `EMPTY` for a
            placeholder. Read-only.
        source (int64): Which row of that group. Read-only.
        advantages (float64): As trained. Where each token has its own, the mean of their sizes, not to be changed.
        masked (bool): No gradient, and in no denominator of the loss. Where nothing would be left on any process,
            denominators stay as they are.
        silent (bool): No gradient, but counted in denominators.
        kl (bool): The row's KL term counts.
    """

    entry: Ints
    source: Ints
    advantages: Floats
    masked: Bools
    silent: Bools
    kl: Bools
    _reshaped: Bools = field(repr=False)  # rows whose advantages a plugin changed
    _placed: tuple[Ints, ...] = field(default=(), repr=False)  # entry and source as the plan has written them
    _known: tuple[Any, dict[Any, Any]] = field(default=(None, {}), repr=False)  # what follows from which `entry`

    @classmethod
    def of(cls, groups: Groups) -> Plan:
        """Return the plan in which every row of the fresh groups trains on itself."""
        shape = groups.advantages.shape
        return cls(
            entry=np.full(shape, FRESH, np.int64),
            source=np.arange(shape[1]) + np.zeros(shape, np.int64),
            advantages=groups.advantages.copy(),
            masked=groups.masked.copy(),
            silent=np.zeros(shape, bool),
            kl=np.ones(shape, bool),
            _reshaped=np.zeros(shape, bool),
        )

    @classmethod
    def nothing(cls) -> Plan:
        """Return the plan of no groups."""
        none = np.zeros((0, 1), bool)
        whole = none.astype(np.int64)
        return cls(whole, whole, none.astype(np.float64), none, none, none, none)

    def __len__(self) -> int:
        return len(self.entry)

    @property
    def fresh(self) -> Bools:
        """Rows that train on themselves, `(n, G)`."""
        return np.asarray(self.entry == FRESH)

    @property
    @_of_entry
    def stored(self) -> Bools:
        """Rows that train on stored rows, `(n, G)`."""
        return np.asarray(self.entry >= 0)

    @property
    @_of_entry
    def unfilled(self) -> Bools:
        """Slots whose rows are all fresh, `(n,)`."""
        return np.asarray(self.fresh.all(axis=1))

    @property
    @_of_entry
    def is_whole(self) -> Bools:
        """Slots that one entry replaces as a whole, `(n,)`."""
        return np.asarray((self.entry == self.entry[:, :1]).all(axis=1) & self.stored[:, 0])

    @_of_entry
    def drawn(self) -> list[tuple[int, Ints]]:
        """List entries in the order of first use, each with its rows as ascending flat indices."""
        rows = np.flatnonzero(self.stored)
        by_entry: dict[int, list[int]] = {}
        for row, entry in zip(rows.tolist(), self.entry.ravel()[rows].tolist(), strict=True):
            by_entry.setdefault(entry, []).append(row)
        return [(entry, np.array(found)) for entry, found in by_entry.items()]

    def column(self, stored: NDArray[Any], fresh: NDArray[Any]) -> NDArray[Any]:
        """Return each row's value, stored or fresh, as a new array `(n, G, …)`.

        Args:
            stored (`(entries, G, …)`): A row column of the table, such as `table.row_length`.
            fresh (`(n, G, …)`): The same of the fresh groups, such as `groups.lengths`.
        """
        values = fresh[np.arange(len(self))[:, None], self.source]
        mask = self.stored
        if not mask.any():
            return np.asarray(values)
        found = stored[np.maximum(self.entry, 0), self.source]
        return np.where(mask.reshape(*mask.shape, *[1] * (found.ndim - 2)), found, values)

    def take(self, slots: Ints) -> Plan:
        """Return the plan of some slots."""
        return Plan(*(getattr(self, name)[slots] for name in TABLE))

    def put(self, slots: Ints, part: Plan) -> None:
        """Write the plan of some slots back."""
        self._known = None, {}
        for name in ("entry", "source", *EDITABLE):
            getattr(self, name)[slots] = getattr(part, name)

    def keep_fresh(self, rows: Bools) -> None:
        """Restore fresh rows at `rows`, `(n, G)`."""
        own = np.arange(self.entry.shape[1])
        self.entry = np.where(rows, FRESH, self.entry)
        self.source = np.where(rows, own, self.source)

    def leave_empty(self, slots: Bools) -> None:
        """Mark the slots, `(n,)`, as empty ones of a further iteration."""
        self.entry = np.where(slots[:, None], EMPTY, self.entry)
        self.masked = self.masked | slots[:, None]

    def guard(self) -> Plan:
        """Make `entry` and `source` read-only, and return a copy to compare a plugin's edits with."""
        self.entry.flags.writeable = self.source.flags.writeable = False
        self._placed = self.entry, self.source
        return Plan(*(getattr(self, name).copy() for name in TABLE))

    def fault(self, before: Plan, of_tokens: bool) -> str:
        """Describe a plugin's invalid edit; empty if there is none.

        Args:
            before ([`Plan`]): What [`guard`][trl_replay.Plan.guard] returned.
            of_tokens (`bool`): Each token has its own advantage.
        """
        if self.entry is not self._placed[0] or self.source is not self._placed[1]:
            return "plan.entry and plan.source are read-only"
        for name, dtype in EDITABLE.items():
            values = getattr(self, name)
            if not isinstance(values, np.ndarray) or values.dtype != dtype or values.shape != self.entry.shape:
                return f"plan.{name} must stay an array of {np.dtype(dtype)} of shape {self.entry.shape}"
        largest = np.abs(self.advantages).max(initial=0.0)
        if not largest <= LARGEST_ADVANTAGE:
            return f"plan.advantages holds {largest:g}: give finite numbers of at most {LARGEST_ADVANTAGE:g}"
        if (before.masked & ~self.masked | before.silent & ~self.silent | self.kl & ~before.kl).any():
            return "a row was unmasked or got its KL term back: a plugin may only mask rows and drop KL terms"
        reshaped = self.advantages != before.advantages
        if (reshaped & (self.entry == EMPTY)).any():
            return "plan.advantages of an empty slot was changed: such rows are placeholders"
        if of_tokens and reshaped.any():
            return "plan.advantages was changed, but this trainer has per-token advantages: mask rows instead"
        self._reshaped = self._reshaped | reshaped
        return ""

    def decided(self) -> tuple[NDArray[Any], ...]:
        """Return the columns that must be equal on processes that share a buffer, without `entry`.

        Of advantages, which of them plugins changed: their last bits may differ between machines.
        """
        return self.source, self.masked, self.silent, self.kl, self._reshaped
