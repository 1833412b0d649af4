"""Which groups of a generation batch have rows on which process."""

from __future__ import annotations

import numpy as np

from ..types import Bools, Ints


class GroupLayout:
    """Where the groups of a batch lie, and those of a further round.

    Whole groups: a round has as many groups on each process as the process that needs most. Groups that straddle
    processes: a round is a whole batch, laid out as the batch itself.

    Args:
        rows (`int`): Rows of each process's batch.
        size (`int`): Rows of a group.
        rank (`int`): This process.
        ranks (`int`): Number of processes.

    Attributes:
        groups (`int`): Groups of the batch, on all processes.
        straddles (`bool`): Whether groups straddle processes.
        width (`int`): Groups with rows on one process, at most.
    """

    def __init__(self, rows: int, size: int, rank: int, ranks: int) -> None:
        self.rows = rows
        self.size = size
        self.rank = rank
        self.ranks = ranks
        self.groups = rows * ranks // size
        self.straddles = rows % size != 0
        self.width = max(self.here(rank) for rank in range(ranks))

    def first(self, rank: int) -> int:
        """The first group with rows on a process."""
        return rank * self.rows // self.size

    def here(self, rank: int) -> int:
        """How many groups have rows on a process."""
        last = ((rank + 1) * self.rows - 1) // self.size
        return last - self.first(rank) + 1

    def rows_here(self) -> list[range]:
        """This process's rows of each group with rows here."""
        begin = self.rank * self.rows
        parts = []
        for group in range(self.first(self.rank), self.first(self.rank) + self.here(self.rank)):
            start = max(group * self.size - begin, 0)
            stop = min((group + 1) * self.size - begin, self.rows)
            parts.append(range(start, stop))
        return parts

    def begins(self) -> Bools:
        """Which of the groups with rows here have their first row here, so that they are counted here."""
        first = self.first(self.rank)
        groups = np.arange(first, first + self.here(self.rank))
        return np.asarray(groups * self.size >= self.rank * self.rows)

    def of_round(self, needed: int) -> int:
        """How many groups have rows on this process in a round in which some process needs `needed`."""
        return self.here(self.rank) if self.straddles else needed

    def mine(self, groups: Ints, count: int) -> Ints:
        """Places of this process's groups.

        Args:
            groups (`(n,)` int64): Numbers of the groups that the scope shares, of the batch or of a round.
            count (`int`): How many of them have rows on this process.
        """
        first = self.first(self.rank) if self.straddles else self.rank * count
        return np.flatnonzero((groups >= first) & (groups < first + count))

    def number(self, rank: int, place: int, count: int) -> int:
        """The number, among those of all processes, of a group that is a process's `place`th in a round of `count`."""
        return self.first(rank) + place if self.straddles else rank * count + place
