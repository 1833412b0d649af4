"""What processes tell each other after a generation: one vector of fixed width, and what all of them make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SeamError
from ..types import Floats, Ints
from .group_layout import GroupLayout
from .merging import KEPT, Generated
from .prompts import ANY

MODE, NEEDED, LIVE, ITEMS = range(4)
HEAD = 4
"""Numbers that come before those of groups."""
LOW = 2**32
"""A key of 63 bits travels as two numbers, which float64 holds exactly."""
NO_PROMPT = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What the processes told each other.

    Attributes:
        needed (`int`): Dead groups of the process that has most.
        live (`int`): Live groups of the batch, on all processes.
        items (`float`): What `num_items_in_batch` changes by, with what was taken last.
        sources (`(groups of all processes,)` int64): The generated group that takes each slot; `KEPT` for none.
        keys (`(generated groups of all processes,)` int64): Of their prompts.
    """

    needed: int
    live: int
    items: float
    sources: Ints
    keys: Ints


class Reports:
    """Writes and reads the vectors.

    Args:
        layout ([`GroupLayout`]): Where groups lie.
    """

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout

    def blank(self, mode: int) -> Floats:
        """The vector of a process that has nothing to tell."""
        vector = np.zeros(HEAD + 3 * self._layout.width)
        vector[MODE] = mode
        return vector

    def write(
        self,
        mode: int,
        current: Generated,
        latest: Generated | None,
        count: int,
        keys: Sequence[int],
        targets: Sequence[int] = (),
    ) -> Floats:
        """This process's vector.

        Args:
            mode (`int`): [`Plan.mode`].
            current ([`Generated`]): The batch as it was before the last round.
            latest ([`Generated`], *optional*): The last round; None if the batch itself was generated last.
            count (`int`): Groups with rows here that were generated last.
            keys (`Sequence[int]`): Of their prompts.
            targets (`Sequence[int]`): Of each of them, the slot with rows here that it was generated for; `ANY` if it
                may take any, as all may if not given.
        """
        width = self._layout.width
        vector = self.blank(mode)
        takes = np.zeros(width, np.int64)
        if latest is not None:
            takes = self._takes(current, latest, count, targets)
            vector[ITEMS] = self._items(current, latest, takes, count)
        mine = self._mine(current)
        dead = current.fresh.dead[mine]
        dead = dead & (takes[: len(mine)] == 0)
        counted = self._layout.begins()
        vector[NEEDED] = (counted & dead).sum()
        vector[LIVE] = (counted & ~dead).sum()
        vector[HEAD : HEAD + width] = takes
        of_keys = vector[HEAD + width :].reshape(width, 2)
        for place, key in enumerate(keys):
            of_keys[place] = divmod(key, LOW)
        return vector

    def _mine(self, current: Generated) -> Ints:
        return self._layout.mine(current.groups, self._layout.mine_here)

    def _takes(self, current: Generated, latest: Generated, count: int, targets: Sequence[int]) -> Ints:
        """Of each group with rows here, the generated one that takes its place, counted from 1; 0 for none."""
        takes = np.zeros(self._layout.width, np.int64)
        dead = current.fresh.dead[self._mine(current)]
        generated = self._layout.mine(latest.groups, count)
        live = ~latest.fresh.dead[generated]
        if self._layout.straddles:  # a slot takes the group of its own number
            slots = np.flatnonzero(dead & live)
            takes[slots] = slots + 1
            return takes
        free: list[int] = []
        for source in np.flatnonzero(live).tolist():
            slot = targets[source] if targets else ANY
            if slot == ANY:
                free.append(source)
            elif not takes[slot]:
                takes[slot] = source + 1
        slots = np.flatnonzero(dead & (takes[: len(dead)] == 0))
        pairs = min(len(slots), len(free))
        takes[slots[:pairs]] = np.array(free[:pairs], np.int64) + 1
        return takes

    def _items(self, current: Generated, latest: Generated, takes: Ints, count: int) -> float:
        """What the rows here add to `num_items_in_batch` more than before."""
        mine = self._mine(current)
        generated = self._layout.mine(latest.groups, count)
        by_group = (-1, self._layout.size)
        before = current.rows.columns["items"].reshape(by_group)
        after = latest.rows.columns["items"].reshape(by_group)
        change = 0.0
        for place in np.flatnonzero(takes).tolist():
            slot = int(mine[place])
            source = int(generated[takes[place] - 1])
            here, first = current.rows.local(slot)
            part = slice(first, first + here.stop - here.start)
            change += float(after[source, part].sum())
            change -= float(before[slot, part].sum())
        return change

    def read(self, vectors: Floats, count: int) -> Told:
        """What all processes told.

        Args:
            vectors (`(ranks, numbers)`): Of all of them.
            count (`int`): Groups that each whose groups are whole has generated last.

        Raises:
            SeamError: Two processes with rows of one group have different prompts for it.
        """
        layout = self._layout
        numbers = vectors.astype(np.int64)
        _, takes, of_keys = np.split(numbers, [HEAD, HEAD + layout.width], axis=1)
        high, low = of_keys.reshape(layout.ranks, layout.width, 2).transpose(2, 0, 1)
        of_ranks = high * LOW + low
        sources = np.full(layout.groups, KEPT)
        generated = layout.groups if layout.straddles else count * layout.ranks
        keys = np.full(generated, NO_PROMPT)
        for rank in range(layout.ranks):
            for place in np.flatnonzero(takes[rank]).tolist():
                slot = layout.first(rank) + place
                source = int(takes[rank, place]) - 1
                sources[slot] = layout.number(rank, source, count)
            for place in range(layout.here(rank) if layout.straddles else count):
                group = layout.number(rank, place, count)
                if keys[group] not in (NO_PROMPT, of_ranks[rank, place]):
                    raise SeamError(_different_prompts(group, rank))
                keys[group] = of_ranks[rank, place]
        return Told(
            needed=int(vectors[:, NEEDED].max()),
            live=int(vectors[:, LIVE].sum()),
            items=float(vectors[:, ITEMS].sum()),
            sources=sources,
            keys=keys,
        )


def _different_prompts(group: int, rank: int) -> str:
    return (
        f"Group {group} of the batch has rows on rank {rank - 1} and rank {rank}, with different prompts for it: "
        "trl_replay_inputs must make the same of a row on every process. Draw from context.rng alone, and go by "
        "nothing that differs between processes."
    )
