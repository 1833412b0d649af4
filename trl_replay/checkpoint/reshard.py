"""Deals the buffers of some ranks to other ranks, when a checkpoint is resumed by another number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..batch.candidates import Candidate, PendingGroups
from ..batch.compose import join
from ..batch.stored import logps_dtype, trainable_sums
from ..data.fields import FieldTable
from ..data.types import Group, Groups, Ints
from ..protocols import Columns, Division
from .format import RankState


@dataclass(frozen=True, slots=True)
class TargetRank:
    """The part of everything that a rank gets.

    Attributes:
        division ([`Division`]): Whether there is one buffer, and whether every rank holds all of it.
        rank (`int`): This rank.
        ranks (`int`): How many there are now.
    """

    division: Division
    rank: int
    ranks: int

    def owner(self, number: int) -> int:
        """The rank that gets the entry with this number; where every rank gets all, this one."""
        return self.rank if self.division.replicated else number % self.ranks


class CompleteCandidate(NamedTuple):
    """A candidate that has all its rows and log-probs: it settles as soon as it is dealt out."""

    serial: int
    """From now on."""
    view: Groups
    """Of it alone, with behavior log-probs."""
    group: Group
    """All of its rows."""
    keys: frozenset[str]
    """Batch keys that it can restore."""
    owner: int
    """The rank that gets its payload."""


@dataclass(slots=True)
class RankShare:
    """Everything that a rank gets.

    Attributes:
        columns (`dict[str, NDArray]`): The table's.
        keysets (`list[frozenset[str]]`): What the column `keys` counts in.
        payload (`Callable`): Yields `(serial, group)`.
        next_serial (`int`): Of the next fresh group.
        ready (`list[CompleteCandidate]`): Candidates that this rank's table is offered.
        dropped (`int`): Candidates that lacked log-probs.
    """

    columns: Columns
    keysets: list[frozenset[str]]
    payload: Callable[[], Iterator[tuple[int, Group]]]
    next_serial: int
    ready: list[CompleteCandidate]
    dropped: int


def reshard(states: Sequence[RankState], target: TargetRank, fields: FieldTable) -> RankShare:
    """Deal entries in the order of their generation to the ranks in turn, the same way on every rank."""
    if target.division.one_buffer:
        return _reshard_one_buffer(states, target, fields)
    return _reshard_private_buffers(states, target, fields)


def _reshard_private_buffers(states: Sequence[RankState], target: TargetRank, fields: FieldTable) -> RankShare:
    """Buffers that each rank had alone: serial numbers were each one's own, and new ones are given, in the order of
    generation."""
    columns, keysets = _concatenated(states)
    lengths = [len(state.columns["serial"]) for state in states]
    source = np.repeat(np.arange(len(states)), lengths)
    order = np.lexsort((columns["serial"], source, columns["update"]))
    columns = {name: column[order] for name, column in columns.items()}
    former_rank = source[order].tolist()
    former_serial = columns["serial"].tolist()
    former = list(zip(former_rank, former_serial, strict=True))
    count = len(former)
    columns["serial"] = np.arange(count)
    columns["owner"] = _owners(count, target)
    mine = columns["owner"] == target.rank
    wanted = {former[number]: number for number in np.flatnonzero(mine).tolist()}

    def payload() -> Iterator[tuple[int, Group]]:
        for number, state in enumerate(states):
            for serial, group in state.payload():
                if (number, serial) in wanted:
                    yield wanted[number, serial], group

    found: list[CompleteCandidate | None] = []
    for pending in _pending(states):
        for candidate in pending.candidates:
            number = len(found)
            found.append(_ready(pending, [candidate], count + number, target.owner(number), fields))
    columns = {name: column[mine] for name, column in columns.items()}
    ready = [one for one in found if one is not None]
    here = [one for one in ready if one.owner == target.rank]
    return RankShare(columns, keysets, payload, count + len(found), here, len(found) - len(ready))


def _reshard_one_buffer(states: Sequence[RankState], target: TargetRank, fields: FieldTable) -> RankShare:
    """One buffer of which every rank had the table: serial numbers stay."""
    columns, keysets = _concatenated(states[:1])
    serials = columns["serial"]
    columns["owner"] = _owners(len(serials), target)
    wanted = set(serials[columns["owner"] == target.rank].tolist())
    holders = states[:1] if target.division.replicated else states

    def payload() -> Iterator[tuple[int, Group]]:
        for state in holders:
            for serial, group in state.payload():
                if serial in wanted:
                    yield serial, group

    pending = _pending(states)
    next_serial = max(state.session["serial"] for state in states)
    found = []
    for number, parts in enumerate(zip(*(of_rank.candidates for of_rank in pending), strict=True)):
        with_rows = [part for part in parts if part.group is not None]
        found.append(_ready(pending[0], with_rows, parts[0].serial, target.owner(number), fields))
    ready = [one for one in found if one is not None]
    left = sum(len(of_rank.candidates) for of_rank in pending)
    return RankShare(columns, keysets, payload, next_serial + left, ready, len(found) - len(ready))


def _concatenated(states: Sequence[RankState]) -> tuple[Columns, list[frozenset[str]]]:
    """The columns that all states have, one state after the other, and the sets of keys that `keys` counts in."""
    keysets = list(dict.fromkeys(keys for state in states for keys in state.keysets))
    names = set.intersection(*(set(state.columns) for state in states))
    columns = {}
    for name in sorted(names):
        columns[name] = np.concatenate([state.columns[name] for state in states])
    renumbered = []
    for state in states:
        numbers = [keysets.index(keys) for keys in state.keysets]
        in_common = np.array(numbers, np.int64)
        renumbered.append(in_common[state.columns["keys"]])
    columns["keys"] = np.concatenate(renumbered)
    return columns, keysets


def _owners(count: int, target: TargetRank) -> Ints:
    owners = [target.owner(number) for number in range(count)]
    return np.array(owners, np.int64)


def _pending(states: Sequence[RankState]) -> list[PendingGroups]:
    return [state.pending for state in states if state.pending is not None]


def _ready(
    pending: PendingGroups, parts: Sequence[Candidate], serial: int, owner: int, fields: FieldTable
) -> CompleteCandidate | None:
    """A candidate, put together from what ranks had of it; None if a row or a log-prob is missing.

    Args:
        pending ([`PendingGroups`]): Those of its batch.
        parts (`Sequence[Candidate]`): In row order.
        serial (`int`): From now on.
        owner (`int`): The rank that gets its payload.
        fields ([`FieldTable`]): How to join its parts.
    """
    groups = []
    for candidate in parts:
        candidate.logps_dtype = logps_dtype(fields)
        if not candidate.complete() or candidate.group is None:
            return None
        groups.append(candidate.group)
    if pending.stale or not groups:
        return None
    group = join(groups, fields)
    sums = trainable_sums(group).cpu().numpy()
    size = pending.groups.advantages.shape[1]
    if len(sums) != size:
        return None
    view = pending.groups.take([parts[0].slot], sums[None])
    return CompleteCandidate(serial, view, group, parts[0].keys, owner)
