"""Image fields: each row of a batch has some images, tiles or patches, concatenated in one tensor.

TRL lays out `pixel_values` in five ways and tells them apart by the other keys of the batch: with `image_grid_thw`
one entry a patch (Qwen-VL), with `image_position_ids` one an image (Gemma), with `spatial_shapes` or `num_tiles` one a
tile (LFM2-VL, InternVL), else one an image (LLaVA) or one a row, padded to the most images of a row (Idefics). Here it
is the same five, and what a row has is cut, stored and put back as one section.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from ..data.fields import PIXELS, TOKEN_TYPES, FieldTable
from ..data.types import Batch, Group, Ints, Placement
from ..errors import BatchError

COUNTS = ("num_images", "num_tiles")
TOLD_BY = frozenset({"image_grid_thw", "image_position_ids", "num_tiles"})
"""Fields with which pixels are not one entry a row, whatever their number."""
Sections: TypeAlias = list[torch.Tensor]
"""One tensor a row: its entries of one field."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The layout of the images of a batch's rows, or of a group's parts: decided once for all of them.

    Attributes:
        like (`dict[str, torch.Tensor]`): The image fields, counts included, each with a tensor of its shape and dtype.
        units (`dict[str, str]`): What one entry of each field stands for: a `"count"` of a row, a `"patch"`, an
            `"image"`, a `"tile"` or the whole `"row"`.
    """

    like: dict[str, torch.Tensor]
    units: dict[str, str]

    @classmethod
    def of(cls, held: Sequence[Mapping[str, torch.Tensor]], fields: FieldTable) -> ImageLayout:
        """Return the layout of `held`: the fields of the first, and tiles if any counts them."""
        like = {key: tensor for key, tensor in held[0].items() if fields.is_image(key)}
        for tensors in held:
            if "num_tiles" in tensors:  # TRL leaves it out of a batch in which every image has one tile
                like.setdefault("num_tiles", tensors["num_tiles"])
        per_row = any(_is_per_row(tensors) for tensors in held)
        return cls(like, _units(like, fields, per_row))

    def entries(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Ints]:
        """Return the number of entries of each row, by field."""
        images = tensors["num_images"].numpy()
        tiles = tensors["num_tiles"].numpy() if "num_tiles" in tensors else images
        grids = tensors.get("image_grid_thw")
        return {key: _entries(unit, images, tiles, grids) for key, unit in self.units.items()}

    def without_images(self, rows: int) -> dict[str, torch.Tensor]:
        """Return the fields of rows without images: no entry, or one of zeros per row if every row has one."""
        blank = {}
        for key, tensor in self.like.items():
            entries = rows if self.units[key] in ("count", "row") else 0
            blank[key] = tensor.new_zeros((entries, *tensor.shape[1:]))
        return blank


def _units(keys: Iterable[str], fields: FieldTable, per_row: bool) -> dict[str, str]:
    """Return the unit of each field, by TRL's rules.

    Args:
        keys (`Iterable[str]`): The image fields of a batch.
        fields ([`FieldTable`]): Their specs.
        per_row (`bool`): Whether pixels are one entry a row, if no other field tells what they are.
    """
    units: dict[str, str] = {key: fields.spec(key).layout for key in keys}
    if "image_grid_thw" in units:
        pixels = "patch"
    elif "image_position_ids" in units:
        pixels = "image"
    elif "num_tiles" in units:
        pixels = "tile"
    else:
        pixels = "row" if per_row else "image"
    masks = "tile" if "spatial_shapes" in units else "row"
    for key, layout in units.items():
        if layout == "pixels":
            units[key] = pixels if key == PIXELS else masks
    return units


def _is_per_row(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the pixels must be one entry per row: there are as many as rows, and not as many as images."""
    if PIXELS not in tensors or not TOLD_BY.isdisjoint(tensors):
        return False
    images = tensors["num_images"]
    entries = tensors[PIXELS].size(0)
    return entries == len(images) and entries != int(images.sum())


def _entries(unit: str, images: Ints, tiles: Ints, grids: torch.Tensor | None) -> Ints:
    """Return the number of entries of a field in each row.

    Args:
        unit (`str`): What one entry stands for.
        images (`(rows,)`): Images of each row.
        tiles (`(rows,)`): Tiles of each row.
        grids (`(images, 3)`, *optional*): The field `image_grid_thw`; the product is an image's number of patches.
    """
    if unit == "image":
        return images
    if unit == "tile":
        return tiles
    if unit != "patch" or grids is None:
        return np.ones_like(images)
    patches = grids.prod(dim=-1).cpu().numpy()
    before = np.concatenate([[0], patches.cumsum()])  # patches before each image
    first_images = np.concatenate([[0], images.cumsum()])
    return np.asarray(np.diff(before[first_images]))


def images_per_row(batch: Mapping[str, Any]) -> Ints:
    """Return the number of images of each row, `(B,)`; -1 in every row of a batch without images."""
    if batch.get(PIXELS) is None:
        return np.full(batch["prompt_ids"].size(0), -1)
    return np.asarray(batch["num_images"], np.int64)


def image_bytes(batch: Mapping[str, Any], fields: FieldTable) -> list[bytes]:
    """Return the pixels of each row's images as bytes, independent of the batch's padding; empty without images."""
    if batch.get(PIXELS) is None:
        return [b""] * batch["prompt_ids"].size(0)
    tensors = _tensors(batch, fields)
    entries = ImageLayout.of([tensors], fields).entries(tensors)[PIXELS]
    sections = torch.split(tensors[PIXELS].cpu().contiguous().view(torch.uint8), entries.tolist())
    return [section.numpy().tobytes().rstrip(b"\0") for section in sections]


def check_images(batch: Mapping[str, Any], fields: FieldTable) -> None:
    """Refuse image fields that can't be divided among rows.

    Raises:
        BatchError: Names the key.
    """
    keys = _keys(batch, fields)
    if not keys:
        return
    rows = batch["prompt_ids"].size(0)
    for key in COUNTS:
        counts = batch.get(key)
        if counts is not None and len(counts) != rows:
            raise BatchError(f"The batch's {key!r} has {len(counts)} entries for {rows} rows.")
    if PIXELS not in keys or batch.get("num_images") is None:
        missing = PIXELS if PIXELS not in keys else "num_images"
        raise BatchError(
            f"The batch holds {', '.join(map(repr, keys))} but lacks {missing!r}, so it is unknown which images "
            "belong to which row. Set use_replay=False for this run."
        )
    tensors = _tensors(batch, fields)
    for key, entries in ImageLayout.of([tensors], fields).entries(tensors).items():
        shape = tuple(tensors[key].shape)
        expected = int(entries.sum())
        if shape[0] != expected:
            raise BatchError(
                f"The batch's {key!r} has shape {shape}, but its rows have {expected} entries: this layout of images "
                "is unknown. Set use_replay=False for this run."
            )


def _keys(batch: Mapping[str, Any], fields: FieldTable) -> list[str]:
    """Return the image fields that hold tensors."""
    keys = []
    for key, value in batch.items():
        if value is not None and key not in COUNTS and fields.is_image(key):
            keys.append(key)
    return keys


def _tensors(batch: Mapping[str, Any], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Return the image fields of a batch as a group holds them, with counts as tensors."""
    tensors = {key: batch[key].detach() for key in _keys(batch, fields)}
    counts = {key: batch[key] for key in COUNTS if batch.get(key) is not None}
    return tensors | {key: torch.tensor(numbers, dtype=torch.int32) for key, numbers in counts.items()}


def cut_images(batch: Mapping[str, Any], fields: FieldTable, rows: slice) -> dict[str, torch.Tensor]:
    """Copy the image fields of some rows; empty if these rows have no image.

    Where all rows have the same images, those of the first are kept. The tensor `num_images` (and `num_tiles`, where
    the batch has it) tells: it has one entry for each row kept.
    """
    numbers = images_per_row(batch)
    if not (numbers[rows] > 0).any():
        return {}
    return _taken(_tensors(batch, fields), len(numbers), range(len(numbers))[rows], fields)


def join_images(parts: Sequence[Group], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Join the image fields of all rows of all `parts`, in order; a part without them has no images."""
    pictured = [part.tensors for part in parts if PIXELS in part.tensors]
    if not pictured:
        return {}
    layout = ImageLayout.of(pictured, fields)
    joined: dict[str, Sections] = {key: [] for key in layout.like}
    for part in parts:
        sections = _sections(part.tensors, len(part.completion_lengths), layout)
        for key, rows in sections.items():
            joined[key] += rows
    return _merge_rows(joined, fields)


def take_images(group: Group, rows: Sequence[int], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Return the image fields of some rows of a group, in the order of `rows`; empty if none has an image."""
    if PIXELS not in group.tensors:
        return {}
    return _taken(group.tensors, len(group.completion_lengths), rows, fields)


def _taken(
    tensors: Mapping[str, torch.Tensor], count: int, rows: Sequence[int], fields: FieldTable
) -> dict[str, torch.Tensor]:
    """Return the image fields of some of `count` rows; empty if none has an image."""
    sections = _sections(tensors, count, ImageLayout.of([tensors], fields))
    if not any(int(sections["num_images"][row]) for row in rows):
        return {}
    chosen = {key: [parts[row] for row in rows] for key, parts in sections.items()}
    return _merge_rows(chosen, fields)


def with_blank_images(batch: Batch, held: Mapping[str, torch.Tensor], fields: FieldTable) -> Batch:
    """Give a batch without images the image fields of `held`, a group's tensors; no row has an image.

    The fields of a `"row"` layout get one entry of zeros a row.
    """
    layout = ImageLayout.of([held], fields)
    blank: Batch = dict(layout.without_images(batch["prompt_ids"].size(0)))
    for key in COUNTS:
        if key in blank:
            blank[key] = blank[key].tolist()
    return batch | blank


def without_images(batch: Batch, fields: FieldTable) -> Batch:
    """Remove the image fields from a batch, as TRL does."""
    return {key: value for key, value in batch.items() if not (fields.is_image(key) or key in TOKEN_TYPES)}


def compose_images(batch: Batch, fields: FieldTable, placements: Sequence[Placement]) -> Batch:
    """Return the image fields of `batch` with those of the placed groups in their rows.

    Raises:
        BatchError: TRL could not tell the layout of the composed batch.
    """
    keys = _keys(batch, fields)
    stored = [placed.group.tensors for placed in placements]
    if not keys:
        if any(PIXELS in tensors for tensors in stored):
            raise BatchError("A stored group has images and the batch has none; it must not be sampled.")
        return {}
    fresh = _tensors(batch, fields)
    layout = ImageLayout.of([fresh, *stored], fields)
    sections = _sections(fresh, len(batch["num_images"]), layout)
    for placed in placements:
        group = placed.group
        stored_sections = _sections(group.tensors, len(group.completion_lengths), layout)
        for key, rows in stored_sections.items():
            sections[key][placed.rows] = rows[placed.part]
    composed: Batch = {}
    for key, rows in sections.items():
        if key in COUNTS:
            composed[key] = [int(count) for count in rows]
        else:
            composed[key] = _merge([row.to(batch[key]) for row in rows], fields, key)
    if layout.units[PIXELS] == "row":
        _refuse_ambiguous(composed["num_images"])
    return composed


def _refuse_ambiguous(numbers: Sequence[int]) -> None:
    """Refuse a number of images that TRL would misread: it distinguishes one entry per row from one per image by
    number alone."""
    if sum(numbers) == len(numbers) and set(numbers) != {1}:
        raise BatchError(
            f"Rows with {numbers} images, padded to one row of {PIXELS!r} each: TRL would treat them as one entry "
            "per image. Leave rows without images out of this dataset, or set use_replay=False."
        )


def _sections(tensors: Mapping[str, torch.Tensor], rows: int, layout: ImageLayout) -> dict[str, Sections]:
    """Return, for each image field and count, the section of each of `rows` rows; empty for rows without images.

    Raises:
        BatchError: The tensors lack a field of the layout.
    """
    if PIXELS not in tensors:
        tensors = layout.without_images(rows)
    tensors = {"num_tiles": tensors["num_images"], **tensors}  # one an image, where they are not counted
    sections = {}
    for key, entries in layout.entries(tensors).items():
        if key not in tensors:
            raise BatchError(
                f"A stored group with images lacks {key!r}, which the batch holds; its processor differs."
            )
        held = list(torch.split(tensors[key], entries.tolist()))
        shared = len(held) == 1  # the same images for all rows
        sections[key] = held * rows if shared else held
    return sections


def _merge_rows(sections: Mapping[str, Sections], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Merge the sections of all rows into one tensor per field; only the first row's if all are equal."""
    shared = all(_all_same(rows) for rows in sections.values())
    merged = {}
    for key, rows in sections.items():
        kept = rows[:1] if shared else rows
        merged[key] = _merge(kept, fields, key)
    return merged


def _all_same(rows: Sections) -> bool:
    first = rows[0]
    return all(row.shape == first.shape and torch.equal(row, first) for row in rows)


def _merge(rows: Sections, fields: FieldTable, key: str) -> torch.Tensor:
    """Concatenate all entries in a new tensor; smaller ones are padded at the end of each dimension, as TRL's
    processors do."""
    sizes = [row.shape[1:] for row in rows if row.size(0)]
    if not sizes:
        sizes = [rows[0].shape[1:]]
    largest = [max(size) for size in zip(*sizes, strict=True)]
    pad = fields.pad_value(fields.spec(key))
    padded = [_grow(row, largest, pad) for row in rows]
    return torch.cat(padded).contiguous()


def _grow(entries: torch.Tensor, sizes: Sequence[int], pad: float) -> torch.Tensor:
    """Pad each entry at the end of its dimensions to `sizes`."""
    old = list(entries.shape[1:])
    if old == list(sizes):
        return entries
    if entries.size(0) == 0:
        return entries.new_zeros((0, *sizes))
    amounts = []
    # torch counts dimensions from the last
    for size, have in zip(reversed(sizes), reversed(old), strict=True):
        amounts += [0, size - have]
    return functional.pad(entries, amounts, value=pad)
