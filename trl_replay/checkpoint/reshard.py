"""Deals the buffers of some ranks to other ranks, when a checkpoint is resumed by another number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.types import Ints, Packed
from ..protocols import Columns
from .format import RankState


@dataclass(frozen=True, slots=True)
class TargetRank:
    """The part of everything that a rank gets.

    Attributes:
        one_buffer (`bool`): Whether all ranks share it.
        rank (`int`): This rank.
        ranks (`int`): How many there are now.
    """

    one_buffer: bool
    rank: int
    ranks: int

    def owner(self, number: int) -> int:
        """The rank that gets the entry with this number."""
        return number % self.ranks


@dataclass(slots=True)
class RankShare:
    """Everything that a rank gets.

    Attributes:
        columns (`dict[str, NDArray]`): The table's.
        keysets (`list[frozenset[str]]`): What the column `keys` counts in.
        payload (`Callable`): Yields `(serial, packed group)` of a set of serials.
        next_serial (`int`): Of the next fresh group.
    """

    columns: Columns
    keysets: list[frozenset[str]]
    payload: Callable[[set[int]], Iterator[tuple[int, Packed]]]
    next_serial: int


def reshard(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """Deal entries in the order of their generation to the ranks in turn, the same way on every rank."""
    if target.one_buffer:
        return _reshard_one_buffer(states, target)
    return _reshard_private_buffers(states, target)


def _reshard_private_buffers(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """Buffers that each rank had alone: serial numbers were each one's own, and new ones are given, in the order of
    generation."""
    columns, keysets = _concatenated(states)
    lengths = [len(state.columns["serial"]) for state in states]
    source = np.repeat(np.arange(len(states)), lengths)
    order = np.lexsort((columns["serial"], source, columns["update"]))
    columns = {name: column[order] for name, column in columns.items()}
    former_rank = source[order].tolist()
    former_serial = columns["serial"].tolist()
    count = len(former_rank)
    columns["serial"] = np.arange(count)
    columns["owner"] = _owners(count, target)
    mine = columns["owner"] == target.rank
    dealt = np.flatnonzero(mine).tolist()

    def payload(wanted: set[int]) -> Iterator[tuple[int, Packed]]:
        for number, state in enumerate(states):
            here = {former_serial[new]: new for new in dealt if new in wanted and former_rank[new] == number}
            for serial, packed in state.payload(here):
                yield here[serial], packed

    columns = {name: column[mine] for name, column in columns.items()}
    return RankShare(columns, keysets, payload, count)


def _reshard_one_buffer(states: Sequence[RankState], target: TargetRank) -> RankShare:
    """One buffer of which every rank had the table: serial numbers stay."""
    columns, keysets = _concatenated(states[:1])
    serials = columns["serial"]
    columns["owner"] = _owners(len(serials), target)
    mine = set(serials[columns["owner"] == target.rank].tolist())

    def payload(wanted: set[int]) -> Iterator[tuple[int, Packed]]:
        for state in states:
            yield from state.payload(wanted & mine)

    next_serial = max(state.session["serial"] for state in states)
    return RankShare(columns, keysets, payload, next_serial)


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
