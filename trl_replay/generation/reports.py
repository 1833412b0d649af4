"""Each process's message after a generation, and the conclusions that all draw from the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..data.types import Bools, Floats, Ints
from ..distributed.agreement import Message
from ..errors import SeamError
from .generated import Generated
from .group_layout import GroupLayout
from .merging import KEPT
from .prompts import ANY

LOW = 2**32
"""A key of 63 bits travels as two numbers, which float64 holds exactly."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Conclusions from all processes' messages.

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
    """Writes and reads the messages of one batch and its rounds.

    Args:
        layout ([`GroupLayout`]): Where the batch's groups lie.
    """

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout
        width = layout.width
        self._message = Message(needed=(), live=(), items=(), takes=(width,), keys=(width, 2))

    def blank(self) -> Floats:
        """Return the vector of a process with nothing to report."""
        return self._message.pack()

    def of_batch(self, batch: Generated, keys: Sequence[int]) -> Floats:
        """Return this process's vector after the batch itself was generated.

        Args:
            batch ([`Generated`]): The batch.
            keys (`Sequence[int]`): Of the prompts of its groups with rows here.
        """
        none = np.full(len(batch.dead_here), KEPT)
        return self._write(batch.dead_here, none, 0.0, keys)

    def of_round(self, current: Generated, latest: Generated, keys: Sequence[int], targets: Sequence[int]) -> Floats:
        """Return this process's vector after a further round.

        Args:
            current ([`Generated`]): The batch as it was before.
            latest ([`Generated`]): The round.
            keys (`Sequence[int]`): Of the prompts of the round's groups with rows here.
            targets (`Sequence[int]`): Of each of these groups, the slot with rows here that it was generated for;
                `ANY` if it may take any.
        """
        dead = current.dead_here
        takes = self._takes(dead, ~latest.dead_here, targets)
        taken = takes != KEPT
        gained = latest.items_here[takes[taken]].sum()
        lost = current.items_here[taken].sum()
        return self._write(dead & ~taken, takes, gained - lost, keys)

    def _write(self, dead: Bools, takes: Ints, items: float, keys: Sequence[int]) -> Floats:
        """Return the vector; `dead` and `takes` refer to the batch's groups with rows here."""
        counted = self._layout.begins()
        all_takes = np.zeros(self._layout.width)
        all_takes[: len(takes)] = takes + 1
        all_keys = np.zeros((self._layout.width, 2))
        for place, key in enumerate(keys):
            all_keys[place] = divmod(key, LOW)
        return self._message.pack(
            needed=(counted & dead).sum(), live=(counted & ~dead).sum(), items=items, takes=all_takes, keys=all_keys
        )

    def _takes(self, dead: Bools, live: Bools, targets: Sequence[int]) -> Ints:
        """Return the round's group that replaces each of the batch's groups here; `KEPT` for none.

        Args:
            dead (`(groups here,)`): Of the batch's.
            live (`(groups of the round here,)`): Of the round's.
            targets (`Sequence[int]`): Of the round's.
        """
        if self._layout.straddles:  # a slot takes the group of its own number
            return np.where(dead & live, np.arange(len(dead)), KEPT)
        takes = np.full(len(dead), KEPT)
        free: list[int] = []
        for source in np.flatnonzero(live).tolist():
            slot = targets[source]
            if slot == ANY:
                free.append(source)
            elif takes[slot] == KEPT:
                takes[slot] = source
        left = np.flatnonzero(dead & (takes == KEPT))
        pairs = min(len(left), len(free))
        takes[left[:pairs]] = free[:pairs]
        return takes

    def read(self, vectors: Floats, generated: GroupLayout) -> RoundReport:
        """Read the messages of all processes.

        Args:
            vectors (`(ranks, numbers)`): Of all of them.
            generated ([`GroupLayout`]): Where the groups lie that were generated last.

        Raises:
            SeamError: Two processes with rows of one group have different prompts for it.
        """
        told = self._message.unpack(vectors)
        takes = told["takes"].astype(np.int64) - 1
        keys = told["keys"].astype(np.int64)
        return RoundReport(
            needed=int(told["needed"].max()),
            live=int(told["live"].sum()),
            items=float(told["items"].sum()),
            sources=self._sources(takes, generated),
            keys=_keys(keys[..., 0] * LOW + keys[..., 1], generated),
        )

    def _sources(self, takes: Ints, generated: GroupLayout) -> Ints:
        """Combine what each process reports of its own groups, `(ranks, width)`, over all processes."""
        sources = np.full(self._layout.groups, KEPT)
        ranks, places = np.nonzero(takes != KEPT)
        slots = self._layout.first(ranks) + places
        sources[slots] = generated.first(ranks) + takes[ranks, places]
        return sources


def _keys(told: Ints, generated: GroupLayout) -> Ints:
    """Return the key of each generated group, from all processes' reports, `(ranks, width)`."""
    here = generated.here(np.arange(len(told)))
    ranks, places = np.nonzero(np.arange(told.shape[1]) < here[:, None])
    groups = generated.first(ranks) + places
    keys = np.empty(generated.groups, np.int64)
    keys[groups] = told[ranks, places]
    differing = np.flatnonzero(keys[groups] != told[ranks, places])
    if len(differing):
        last = differing[-1]
        raise SeamError(_different_prompts(groups[last], ranks[last]))
    return keys


def _different_prompts(group: int, rank: int) -> str:
    return (
        f"Group {group} of the batch has rows on rank {rank} and rank {rank + 1}, with different prompts: "
        "trl_replay_inputs must return the same rows on every process. Draw from context.rng alone, and depend on "
        "nothing that differs between processes."
    )
