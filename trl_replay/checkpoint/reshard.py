"""Deals the buffers of some ranks to other ranks, when a checkpoint is resumed by another number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.compose import join
from ..buffer.candidates import logps_dtype, trainable_sums
from ..fields import FieldTable
from ..types import Group, Groups
from .format import RankState


@dataclass(frozen=True, slots=True)
class RankShard:
    """Which part of everything a rank gets.

    Attributes:
        kind (`str`): `"process"`: every rank some entries; `"gathered"`: every rank everything; `"sharded"`: every
            rank all metadata and some payload.
        rank (`int`): This rank.
        ranks (`int`): How many there are now.
    """

    kind: str | None
    rank: int
    ranks: int

    def owner(self, number: int) -> int:
        """The rank that gets the entry with this number; for gathered, this one."""
        return self.rank if self.kind == "gathered" else number % self.ranks


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
        waiting ([`ReadyGroups`]): Candidates.
    """

    columns: dict[str, NDArray[Any]]
    keysets: list[frozenset[str]]
    payload: Callable[[], Iterator[tuple[int, Group]]]
    next_serial: int
    waiting: ReadyGroups


def reshard(states: Sequence[RankState], shares: RankShard, fields: FieldTable) -> Resharded:
    """Deals entries in the order of their generation to the ranks in turn, the same way on every rank.

    Buffers that each rank had alone have serial numbers of their own, and get new ones, in the order of generation.
    """
    own = shares.kind == "process"
    tables = states if own else states[:1]
    keysets = list(dict.fromkeys(keys for state in tables for keys in state.keysets))
    names = set.intersection(*(set(state.columns) for state in tables))
    columns = {name: np.concatenate([state.columns[name] for state in tables]) for name in sorted(names)}
    columns["keys"] = np.concatenate(
        [np.array([keysets.index(k) for k in s.keysets], np.int64)[s.columns["keys"]] for s in tables]
    )
    source = np.repeat(
        np.arange(len(tables)),
        [len(state.columns["serial"]) for state in tables],
    )
    order = np.lexsort((columns["serial"], source, columns["step"])) if own else np.arange(len(source))
    columns, source = (
        {name: column[order] for name, column in columns.items()},
        source[order],
    )
    old = list(zip(source.tolist(), columns["serial"].tolist(), strict=True))
    owners = np.array([shares.owner(number) for number in range(len(old))], np.int64)
    start = len(old)
    if own:
        columns["serial"] = np.arange(len(old))
    else:
        start = max(state.session["serial"] for state in states)
    columns["owner"] = owners
    serials = columns["serial"].tolist()
    wanted = {key: serial for key, serial, owner in zip(old, serials, owners, strict=True) if owner == shares.rank}

    def payload() -> Iterator[tuple[int, Group]]:
        for number, state in enumerate(states):
            if shares.kind == "gathered" and number:
                return
            for serial, group in state.payload():
                key = (number if own else 0, serial)
                if key in wanted:
                    yield wanted[key], group

    kept = owners == shares.rank if own else np.ones(len(old), bool)
    waiting = _waiting(states, shares, fields, start if own else None)
    return Resharded(
        {name: c[kept] for name, c in columns.items()},
        keysets,
        payload,
        start + _count(states),
        waiting,
    )


def _count(states: Sequence[RankState]) -> int:
    return sum(len(state.noted.candidates) for state in states if state.noted is not None)


def _waiting(
    states: Sequence[RankState],
    shares: RankShard,
    fields: FieldTable,
    renumbered: int | None,
) -> ReadyGroups:
    """The candidates of all ranks, put together from their parts."""
    waiting, views = ReadyGroups(), list[Groups]()
    for number, told in enumerate(_candidates(states, own=renumbered is not None)):
        view, stale, parts = told
        for candidate in parts:
            candidate.logps_dtype = logps_dtype(fields)
        if stale or not parts or not all(candidate.complete() for candidate in parts):
            waiting.dropped += 1
            continue
        group = join(
            [candidate.group for candidate in parts if candidate.group is not None],
            fields,
        )
        serial = parts[0].serial if renumbered is None else renumbered + number
        sums = trainable_sums(group)
        if len(sums) < view.advantages.shape[1] or not np.isfinite(sums).all():
            waiting.dropped += 1
            continue
        owner = shares.owner(number)
        if renumbered is None or owner == shares.rank:
            views.append(view.take([parts[0].slot], sums[None]))
            waiting.serials.append(serial)
            waiting.owners[serial] = owner
            waiting.sizes.append(group.nbytes)
            waiting.keys.append(parts[0].keys)
            if owner == shares.rank:
                waiting.payload[serial] = group
    waiting.groups = Groups.concatenate(views) if views else None
    return waiting


def _candidates(states: Sequence[RankState], own: bool) -> Iterator[tuple[Groups, bool, list[Any]]]:
    """Of each candidate its view, whether it is stale, and the parts that ranks have, in row order."""
    noted = [state.noted for state in states if state.noted is not None]
    if own:
        for each in noted:
            for candidate in each.candidates:
                yield each.groups, each.stale, [candidate]
        return
    for position in range(len(noted[0].candidates) if noted else 0):
        parts = [each.candidates[position] for each in noted]
        yield (
            noted[0].groups,
            noted[0].stale,
            [part for part in parts if part.group is not None],
        )
