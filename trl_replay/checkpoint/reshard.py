"""Deals the buffers of some ranks to other ranks, when a checkpoint is resumed by another number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch.compose import join
from ..buffer.candidates import Candidate, PendingGroups, logps_dtype, trainable_sums
from ..fields import FieldTable
from ..protocols import Division
from ..types import Group, Groups, Ints
from .format import RankState


@dataclass(frozen=True, slots=True)
class RankShard:
    """Which part of everything a rank gets.

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


@dataclass(slots=True)
class ReadyGroups:
    """Whole candidates that had all their log-probs: they settle as soon as they are dealt out.

    Attributes:
        groups ([`Groups`]): Their view, with behaviour log-probs.
        serials (`list[int]`): Their serial numbers.
        payload (`dict[int, Group]`): By serial, of those that this rank gets.
        owners (`dict[int, int]`): By serial, the rank that gets the payload.
        sizes (`list[int]`): Bytes of payload of each.
        keys (`list[frozenset[str]]`): Batch keys that each can restore.
        dropped (`int`): Candidates that lacked log-probs.
    """

    groups: Groups | None = None
    serials: list[int] = field(default_factory=list)
    payload: dict[int, Group] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    keys: list[frozenset[str]] = field(default_factory=list)
    dropped: int = 0


@dataclass(slots=True)
class Resharded:
    """What a rank gets.

    Attributes:
        columns (`dict[str, NDArray]`): The table's.
        keysets (`list[frozenset[str]]`): What the column `keys` counts in.
        payload (`Callable`): Yields `(serial, group)`.
        next_serial (`int`): Of the next fresh group.
        ready ([`ReadyGroups`]): Candidates.
    """

    columns: dict[str, NDArray[Any]]
    keysets: list[frozenset[str]]
    payload: Callable[[], Iterator[tuple[int, Group]]]
    next_serial: int
    ready: ReadyGroups


class _WholeCandidate(NamedTuple):
    """A candidate put together: the view of its batch, and the parts that ranks had, in row order."""

    pending: PendingGroups
    parts: list[Candidate]


def reshard(states: Sequence[RankState], shard: RankShard, fields: FieldTable) -> Resharded:
    """Deals entries in the order of their generation to the ranks in turn, the same way on every rank."""
    if shard.division.one_buffer:
        return _reshard_one_buffer(states, shard, fields)
    return _reshard_private_buffers(states, shard, fields)


def _reshard_private_buffers(states: Sequence[RankState], shard: RankShard, fields: FieldTable) -> Resharded:
    """Buffers that each rank had alone: serial numbers were each one's own, and new ones are given, in the order of
    generation."""
    columns, keysets = _concatenated(states)
    lengths = [len(state.columns["serial"]) for state in states]
    source = np.repeat(np.arange(len(states)), lengths)
    order = np.lexsort((columns["serial"], source, columns["step"]))
    columns = {name: column[order] for name, column in columns.items()}
    former = list(zip(source[order].tolist(), columns["serial"].tolist(), strict=True))
    count = len(former)
    columns["serial"] = np.arange(count)
    columns["owner"] = _owners(count, shard)
    mine = columns["owner"] == shard.rank
    wanted = {former[number]: number for number in np.flatnonzero(mine).tolist()}

    def payload() -> Iterator[tuple[int, Group]]:
        for number, state in enumerate(states):
            for serial, group in state.payload():
                if (number, serial) in wanted:
                    yield wanted[number, serial], group

    candidates = [
        _WholeCandidate(pending, [candidate]) for pending in _pending(states) for candidate in pending.candidates
    ]
    ready = ReadyGroups()
    for number, whole in enumerate(candidates):
        owner = shard.owner(number)
        _add(ready, whole, count + number, owner, owner == shard.rank, owner == shard.rank, fields)
    columns = {name: column[mine] for name, column in columns.items()}
    return Resharded(columns, keysets, payload, count + len(candidates), ready)


def _reshard_one_buffer(states: Sequence[RankState], shard: RankShard, fields: FieldTable) -> Resharded:
    """One buffer of which every rank had the table: serial numbers stay."""
    columns, keysets = _concatenated(states[:1])
    serials = columns["serial"]
    columns["owner"] = _owners(len(serials), shard)
    wanted = set(serials[columns["owner"] == shard.rank].tolist())
    holders = states[:1] if shard.division.replicated else states

    def payload() -> Iterator[tuple[int, Group]]:
        for state in holders:
            for serial, group in state.payload():
                if serial in wanted:
                    yield serial, group

    pending = _pending(states)
    next_serial = max(state.session["serial"] for state in states)
    ready = ReadyGroups()
    for number in range(len(pending[0].candidates) if pending else 0):
        parts = [each.candidates[number] for each in pending]
        held = [part for part in parts if part.group is not None]
        owner = shard.owner(number)
        _add(ready, _WholeCandidate(pending[0], held), parts[0].serial, owner, True, owner == shard.rank, fields)
    left = sum(len(each.candidates) for each in pending)
    return Resharded(columns, keysets, payload, next_serial + left, ready)


def _concatenated(states: Sequence[RankState]) -> tuple[dict[str, NDArray[Any]], list[frozenset[str]]]:
    """The columns that all states have, one state after the other, and the sets of keys that `keys` counts in."""
    keysets = list(dict.fromkeys(keys for state in states for keys in state.keysets))
    names = set.intersection(*(set(state.columns) for state in states))
    columns = {name: np.concatenate([state.columns[name] for state in states]) for name in sorted(names)}
    renumbered = []
    for state in states:
        numbers = np.array([keysets.index(keys) for keys in state.keysets], np.int64)
        renumbered.append(numbers[state.columns["keys"]])
    columns["keys"] = np.concatenate(renumbered)
    return columns, keysets


def _owners(count: int, shard: RankShard) -> Ints:
    return np.array([shard.owner(number) for number in range(count)], np.int64)


def _pending(states: Sequence[RankState]) -> list[PendingGroups]:
    return [state.pending for state in states if state.pending is not None]


def _add(
    ready: ReadyGroups,
    whole: _WholeCandidate,
    serial: int,
    owner: int,
    seen: bool,
    held: bool,
    fields: FieldTable,
) -> None:
    """Adds a candidate that has all its log-probs; others are counted.

    Args:
        ready ([`ReadyGroups`]): Where to.
        whole ([`_WholeCandidate`]): The candidate.
        serial (`int`): Its serial number from now on.
        owner (`int`): The rank that gets its payload.
        seen (`bool`): Whether this rank's table is offered it.
        held (`bool`): Whether this rank gets the payload.
        fields ([`FieldTable`]): How to join its parts.
    """
    group = _joined(whole, fields)
    if group is None:
        ready.dropped += 1
        return
    if not seen:
        return
    first = whole.parts[0]
    sums = trainable_sums(group)
    view = whole.pending.groups.take([first.slot], sums[None])
    ready.groups = view if ready.groups is None else Groups.concatenate([ready.groups, view])
    ready.serials.append(serial)
    ready.owners[serial] = owner
    ready.sizes.append(group.nbytes)
    ready.keys.append(first.keys)
    if held:
        ready.payload[serial] = group


def _joined(whole: _WholeCandidate, fields: FieldTable) -> Group | None:
    """The candidate's group with all rows; None if a row or a log-prob is missing."""
    if whole.pending.stale or not whole.parts:
        return None
    for candidate in whole.parts:
        candidate.logps_dtype = logps_dtype(fields)
    complete = [candidate.complete() for candidate in whole.parts]
    if not all(complete):
        return None
    group = join([part.group for part in whole.parts if part.group is not None], fields)
    sums = trainable_sums(group)
    size = whole.pending.groups.advantages.shape[1]
    return group if len(sums) == size and bool(np.isfinite(sums).all()) else None
