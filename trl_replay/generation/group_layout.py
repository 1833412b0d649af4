"""The layout of a generation batch's groups on processes."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from ..data.types import Bools, Ints

_Rank = TypeVar("_Rank", int, Ints)


class GroupLayout:
    """Layout of the groups of a batch or of a further round on processes.

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

    def first(self, rank: _Rank) -> _Rank:
        """The first group with rows on a process (or on each of several)."""
        return rank * self.rows // self.size

    def here(self, rank: _Rank) -> _Rank:
        """Return the number of groups with rows on a process (or on each of several)."""
        end = (rank + 1) * self.rows
        last = (end - 1) // self.size
        return last - self.first(rank) + 1

    @property
    def mine_first(self) -> int:
        """The first group with rows on this process."""
        return self.first(self.rank)

    @property
    def mine_here(self) -> int:
        """Number of groups with rows on this process."""
        return self.here(self.rank)

    def rows_here(self) -> list[range]:
        """This process's rows of each group with rows here."""
        parts = []
        start = self.mine_first * self.size - self.rank * self.rows
        for _ in range(self.mine_here):
            stop = start + self.size
            parts.append(range(max(start, 0), min(stop, self.rows)))
            start = stop
        return parts

    def begins(self) -> Bools:
        """Return a mask of the groups with rows here whose first row is here, which this process counts."""
        groups = self.mine_first + np.arange(self.mine_here)
        first_rows = groups * self.size
        return np.asarray(first_rows >= self.rank * self.rows)

    def of_round(self, needed: int) -> GroupLayout:
        """Return the layout of a round in which the neediest process needs `needed` groups."""
        if self.straddles:
            return self
        return GroupLayout(needed * self.size, self.size, self.rank, self.ranks)
