"""Replace dead groups of a generation batch by groups of a dynamic-sampling round, in all data of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch.compose import compose, cut, implied_values
from ..batch.images import images_per_row, with_blank_images, without_images
from ..data.fields import PIXELS, FieldTable
from ..data.types import Batch, Groups, Ints
from ..distributed.row_layout import RowLayout
from ..errors import BatchError
from .generated import Generated

KEPT = -1
"""The slot keeps the group that it has."""
OF_A_ROW = ("advantages", "lengths", "trainable", "items", "images", "prompt")
"""Shared columns that tell of the fresh batch; the others tell of the one before."""


def merged(
    current: Generated, other: Generated, sources: Ints, fields: FieldTable, multiple_of: int | None
) -> Generated:
    """Return the batch in which groups of a round replace some of its own.

    `num_items_in_batch` is passed through: what all processes exchanged is known later.

    Args:
        current ([`Generated`]): The batch.
        other ([`Generated`]): The round.
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


def _merged_scores(current: Generated, other: Generated, sources: Ints) -> torch.Tensor:
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
    current: Generated, other: Generated, slots: Ints, sources: Ints, fields: FieldTable, multiple_of: int | None
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
