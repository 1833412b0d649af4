"""What processes tell each other of a round, and the batch that live groups of rounds make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch.compose import compose, cut, implied_values
from ..batch.images import images_per_row, with_blank_images, without_images
from ..data.fields import PIXELS, FieldTable
from ..data.types import Batch, Bools, Floats, Groups, Ints
from ..distributed.agreement import Message
from ..distributed.row_layout import RowLayout
from ..errors import BatchError, SeamError
from .judge import JudgedBatch
from .prompts import ANY, GroupLayout

KEPT = -1
"""The slot keeps the group that it has."""
OF_A_ROW = ("advantages", "lengths", "trainable", "items", "images", "prompt")
"""Shared columns that tell of the fresh batch; the others tell of the one before."""


def merged(
    current: JudgedBatch, other: JudgedBatch, sources: Ints, fields: FieldTable, multiple_of: int | None
) -> JudgedBatch:
    """Return the batch in which groups of a round replace some of its own.

    `num_items_in_batch` is passed through: what all processes exchanged is known later.

    Args:
        current ([`JudgedBatch`]): The batch.
        other ([`JudgedBatch`]): The round.
        sources (`(groups of all processes,)` int64): Of each slot, the round's group that takes it; `KEPT` for none.
        fields ([`FieldTable`]): How to cut and pad each key.
        multiple_of (`int`, *optional*): The trainer's `pad_to_multiple_of`.
    """
    scored = _merged_scores(current, other, sources)
    of_shared = sources[current.groups]
    slots = np.flatnonzero(of_shared != KEPT)
    taken = np.searchsorted(other.groups, of_shared[slots])  # from here on, places among the shared groups
    batch = _merged_batch(current, other, slots, taken, fields.exact(), multiple_of)
    rows = _merged_rows(current.rows, other.rows, slots, taken)
    fresh = _merged_groups(current.fresh, other.fresh, slots, taken)
    return replace(current, batch=batch, rows=rows, fresh=fresh, scored=scored)


def _merged_groups(current: Groups, other: Groups, slots: Ints, sources: Ints) -> Groups:
    """The view of the merged batch."""
    if not len(slots):
        return current
    index = np.arange(len(current))
    index[slots] = len(current) + sources
    return Groups.concatenate([current, other]).take(index)


def _merged_scores(current: JudgedBatch, other: JudgedBatch, sources: Ints) -> torch.Tensor:
    """Return the merged batch's rewards, `(rows of all processes, functions)`."""
    scored = current.scored.clone()
    functions = scored.size(1)
    shape = (-1, current.rows.size, functions)
    by_group = scored.view(shape)
    of_round = other.scored.view(shape)
    taken = np.flatnonzero(sources != KEPT)
    slots = torch.from_numpy(taken)
    groups = torch.from_numpy(sources[taken])
    by_group[slots] = of_round[groups]
    return scored


def _merged_rows(current: RowLayout, other: RowLayout, slots: Ints, sources: Ints) -> RowLayout:
    """The shared columns of the merged batch."""
    columns = dict(current.columns)
    by_group = (-1, current.size)
    for name in OF_A_ROW:
        column = columns[name].copy()
        of_round = other.columns[name].reshape(by_group)
        column.reshape(by_group)[slots] = of_round[sources]
        columns[name] = column
    by_process = columns["images"].reshape(-1, current.count)
    columns["images"] = _images_of_batches(by_process).ravel()
    local = {"row": current.columns["row"][current.here]}
    return RowLayout(columns, local, current.size)


def _images_of_batches(images: NDArray[Any]) -> NDArray[Any]:
    """Return the number of images of each row, `(processes, rows)`; -1 in all rows of a batch without images, and only
    there."""
    pictured = (images > 0).any(axis=1, keepdims=True)
    return np.where(pictured, np.maximum(images, 0), -1)


def _merged_batch(
    current: JudgedBatch, other: JudgedBatch, slots: Ints, sources: Ints, fields: FieldTable, multiple_of: int | None
) -> Batch:
    """Return this process's batch with the round's rows in their slots."""
    exchanges = current.rows.exchanges(slots.tolist(), sources.tolist(), other.rows)
    if not exchanges:
        return current.batch
    batch, of_round = _with_the_same_keys(current.batch, other.batch, fields)
    groups = cut(of_round, fields, [one.source for one in exchanges])
    pictured = [group.tensors for group in groups if PIXELS in group.tensors]
    if pictured and batch.get(PIXELS) is None:
        batch = with_blank_images(batch, pictured[0], fields)
    placements = [one.placement(group) for one, group in zip(exchanges, groups, strict=True)]
    composed = compose(batch, fields, placements, multiple_of)
    if composed.get(PIXELS) is not None and not images_per_row(composed).any():
        return without_images(composed, fields)
    return composed


def _with_the_same_keys(batch: Batch, other: Batch, fields: FieldTable) -> tuple[Batch, Batch]:
    """Return both batches with the keys of either, except those of images.

    Raises:
        BatchError: A key of one of them stands for nothing where it is missing.
    """
    added: list[Batch] = []
    for one, another in ((batch, other), (other, batch)):
        filled = dict(one)
        for key, spec in fields.of(another).items():
            if one.get(key) is not None or fields.is_image(key):
                continue
            if spec.implied is None:
                raise BatchError(
                    f"One dynamic-sampling round has {key!r} and another does not, so they can't be merged. Leave "
                    "replay_refill out."
                )
            filled[key] = implied_values(one, spec, another[key].dtype)
        added.append(filled)
    return added[0], added[1]


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

    def of_batch(self, batch: JudgedBatch, keys: Sequence[int]) -> Floats:
        """Return this process's vector after the batch itself was generated.

        Args:
            batch ([`JudgedBatch`]): The batch.
            keys (`Sequence[int]`): Of the prompts of its groups with rows here.
        """
        none = np.full(len(batch.dead_here), KEPT)
        return self._write(batch.dead_here, none, 0.0, keys)

    def of_round(
        self, current: JudgedBatch, latest: JudgedBatch, keys: Sequence[int], targets: Sequence[int]
    ) -> Floats:
        """Return this process's vector after a further round.

        Args:
            current ([`JudgedBatch`]): The batch as it was before.
            latest ([`JudgedBatch`]): The round.
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
        """Return, for each slot, the round's group that fills it, of what processes tell, `(ranks, width)`; `KEPT` for
        none."""
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
