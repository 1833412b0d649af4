"""Image fields: each row of a batch has some images, tiles or patches, concatenated in one tensor.

What belongs to which row is TRL's to say (`compat.split_images`). What a row has is cut, stored, and put back as one
section, padded to the size of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from .. import compat
from ..data.fields import PIXELS, TOKEN_TYPES, FieldTable
from ..data.types import Batch, Group, Ints, Placement
from ..errors import BatchError

IMAGES, TILES = COUNTS = ("num_images", "num_tiles")
OF_IMAGES = frozenset({"image_grid_thw", "image_position_ids", "spatial_shapes", TILES})
"""Fields with which pixels are never one entry a row."""
Sections: TypeAlias = dict[str, list[Any]]
"""What each row has, by field: a tensor of its entries, or a number of `COUNTS`."""


def images_per_row(batch: Mapping[str, Any]) -> Ints:
    """Return the number of images of each row, `(B,)`; -1 in every row of a batch without images."""
    if batch.get(PIXELS) is None:
        return np.full(batch["prompt_ids"].size(0), -1)
    return np.asarray(batch[IMAGES], np.int64)


def image_bytes(batch: Mapping[str, Any], fields: FieldTable) -> list[bytes]:
    """Return the pixels of each row's images as bytes, independent of the batch's padding; empty without images."""
    if batch.get(PIXELS) is None:
        return [b""] * batch["prompt_ids"].size(0)
    sections = _sections({**batch, PIXELS: batch[PIXELS].cpu()}, fields)[PIXELS]
    return [section.contiguous().view(torch.uint8).numpy().tobytes().rstrip(b"\0") for section in sections]


def check_images(batch: Mapping[str, Any], fields: FieldTable) -> None:
    """Refuse image fields that can't be divided among rows.

    Raises:
        BatchError: Names the keys.
    """
    keys = _keys(batch, fields)
    if not keys:
        return
    if PIXELS not in keys or batch.get(IMAGES) is None:
        missing = PIXELS if PIXELS not in keys else IMAGES
        raise BatchError(
            f"The batch holds {', '.join(map(repr, keys))} but lacks {missing!r}, so it is unknown which images "
            "belong to which row. Set use_replay=False for this run."
        )
    rows = batch["prompt_ids"].size(0)
    if len(batch[IMAGES]) != rows:
        raise BatchError(f"The batch's {IMAGES!r} has {len(batch[IMAGES])} entries for {rows} rows.")
    _refuse_rows_without(_sections(batch, fields))


def _keys(batch: Mapping[str, Any], fields: FieldTable) -> list[str]:
    """Return the image fields that hold tensors."""
    return [key for key, value in batch.items() if value is not None and key not in COUNTS and fields.is_image(key)]


def _sections(held: Mapping[str, Any], fields: FieldTable) -> Sections:
    """Return what each row has of a batch's or a group's images, as TRL divides them.

    Raises:
        BatchError: It does not.
    """
    tensors = {key: held[key].detach() for key in _keys(held, fields)}
    counts = {key: [int(count) for count in held[key]] for key in COUNTS if held.get(key) is not None}
    try:
        split = compat.split_images({**tensors, **counts})
    except (RuntimeError, ValueError):
        split = {}
    if {len(rows) for rows in split.values()} != {len(counts[IMAGES])}:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        raise BatchError(
            f"Rows of {counts[IMAGES]} images have {shapes}, which TRL does not divide among them: this layout is "
            "unknown. Set use_replay=False for this run."
        )
    return {key: list(torch.split(rows, 1) if torch.is_tensor(rows) else rows) for key, rows in split.items()}


def _refuse_rows_without(sections: Sections) -> None:
    """Refuse rows without images beside padded entries of one a row: TRL tells these from one an image by their number
    alone, and would give rows the images of others."""
    pixels, images = sections[PIXELS], sections[IMAGES]
    padded = "pixel_attention_mask" in sections or any(
        len(entries) != count for entries, count in zip(pixels, images, strict=True)
    )
    if 0 in images and padded and OF_IMAGES.isdisjoint(sections):
        raise BatchError(
            f"Rows with {images} images, padded to one entry of {PIXELS!r} a row (Idefics), where TRL takes images of "
            "other rows for those without. Leave rows without images out of the dataset, or set use_replay=False."
        )


def cut_images(batch: Mapping[str, Any], fields: FieldTable, rows: slice) -> dict[str, torch.Tensor]:
    """Copy the image fields of some rows; empty if these rows have no image.

    Where all rows have the same images, those of the first are kept. The tensor `num_images` (and `num_tiles`, where
    the batch has it) tells: it has one entry for each row kept.
    """
    if batch.get(PIXELS) is None or not (images_per_row(batch)[rows] > 0).any():
        return {}
    return _as_held({key: held[rows] for key, held in _sections(batch, fields).items()}, fields)


def join_images(parts: Sequence[Group], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Join the image fields of all rows of all `parts`, in order; a part without them has no images."""
    if not any(PIXELS in part.tensors for part in parts):
        return {}
    alike = _alike([_of_group(part, fields) for part in parts], [len(part.completion_lengths) for part in parts])
    return _as_held({key: [row for part in alike for row in part[key]] for key in alike[0]}, fields)


def take_images(group: Group, rows: Sequence[int], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Return the image fields of some rows of a group, in the order of `rows`; empty if none has an image."""
    taken = {key: [held[row] for row in rows] for key, held in _of_group(group, fields).items()}
    return _as_held(taken, fields) if any(taken.get(IMAGES, [])) else {}


def with_blank_images(batch: Batch, held: Mapping[str, torch.Tensor], fields: FieldTable) -> Batch:
    """Give a batch without images the image fields of `held`, a group's tensors; no row has an image."""
    blank = {key: held[key][:0] for key in _keys(held, fields)}
    return {**batch, **blank, **{key: [0] * len(batch["prompt_ids"]) for key in COUNTS if key in held}}


def without_images(batch: Batch, fields: FieldTable) -> Batch:
    """Remove the image fields from a batch, as TRL does."""
    return {key: value for key, value in batch.items() if not (fields.is_image(key) or key in TOKEN_TYPES)}


def compose_images(batch: Batch, fields: FieldTable, placements: Sequence[Placement]) -> Batch:
    """Return the image fields of `batch` with those of the placed groups in their rows.

    Raises:
        BatchError: TRL could not tell the layout of the composed batch.
    """
    stored = [_of_group(placed.group, fields) for placed in placements]
    if not _keys(batch, fields):
        if any(stored):
            raise BatchError("A stored group has images and the batch has none; it must not be sampled.")
        return {}
    rows = [len(batch[IMAGES]), *(len(placed.group.completion_lengths) for placed in placements)]
    composed, *alike = _alike([_sections(batch, fields), *stored], rows)
    for placed, sections in zip(placements, alike, strict=True):
        for key, held in sections.items():
            like = batch.get(key)
            taken = held[placed.part]
            composed[key][placed.rows] = [row.to(like) for row in taken] if torch.is_tensor(like) else taken
    return _merged(composed, fields)


def _of_group(group: Group, fields: FieldTable) -> Sections:
    """Return what each row of a group has; nothing without images."""
    if PIXELS not in group.tensors:
        return {}
    rows, sections = len(group.completion_lengths), _sections(group.tensors, fields)
    return {key: held * rows if len(held) == 1 else held for key, held in sections.items()}


def _alike(parts: Sequence[Sections], rows: Sequence[int]) -> list[Sections]:
    """Return all parts, of so many rows each, with the fields of the first one with images, and with tiles if any
    counts them: TRL leaves these out of a batch in which every image has one.

    Raises:
        BatchError: A part with images lacks a field.
    """
    pictured = [part for part in parts if part]
    blank = {key: 0 if key in COUNTS else held[0][:0] for key, held in pictured[0].items()}
    if any(TILES in part for part in pictured):
        blank[TILES] = 0
    alike = []
    for part, count in zip(parts, rows, strict=True):
        full = {TILES: part[IMAGES], **part} if part else {key: [none] * count for key, none in blank.items()}
        for key in blank.keys() - full.keys():
            raise BatchError(
                f"A stored group with images lacks {key!r}, which the batch holds; its processor differs."
            )
        alike.append({key: list(full[key]) for key in blank})
    return alike


def _as_held(sections: Sections, fields: FieldTable) -> dict[str, torch.Tensor]:
    """Return sections as a group holds them, with counts as tensors: only the first row's if all are equal."""
    if all(_all_same(rows) for rows in sections.values()):
        sections = {key: rows[:1] for key, rows in sections.items()}
    return {
        key: torch.tensor(value, dtype=torch.int32) if key in COUNTS else value
        for key, value in _merged(sections, fields).items()
    }


def _all_same(rows: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(row), torch.as_tensor(rows[0])) for row in rows)


def _merged(sections: Sections, fields: FieldTable) -> Batch:
    """Concatenate the entries of all rows in new tensors; smaller ones are padded at the end of each dimension, as
    TRL's processors do."""
    _refuse_rows_without(sections)
    return {
        key: rows if key in COUNTS else torch.cat(_of_one_size(rows, fields.pad_value(fields.spec(key))))
        for key, rows in sections.items()
    }


def _of_one_size(rows: Sequence[torch.Tensor], pad: float) -> list[torch.Tensor]:
    sizes = [row.shape[1:] for row in rows if len(row)] or [rows[0].shape[1:]]
    largest = [max(size) for size in zip(*sizes, strict=True)]
    grown = []
    for row in rows:
        # torch counts dimensions from the last
        missing = [size - have for size, have in zip(largest, row.shape[1:], strict=True)][::-1]
        grown.append(functional.pad(row, [side for size in missing for side in (0, size)], value=pad))
    return grown
