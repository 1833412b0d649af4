"""Image fields: each row of a batch has some images, tiles or patches of its own, side by side in one tensor.

TRL lays out `pixel_values` in five ways and tells them apart by the other keys of the batch: with `image_grid_thw`
one entry a patch (Qwen-VL), with `image_position_ids` one an image (Gemma), with `spatial_shapes` or `num_tiles` one a
tile (LFM2-VL, InternVL), else one an image (LLaVA) or one a row, padded to the most images of a row (Idefics). Here it
is the same five, and what a row has is cut, stored and put back as one section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..errors import BatchError
from ..fields import PIXELS, FieldTable
from ..types import Batch, Group, Ints, Placement

COUNTS = ("num_images", "num_tiles")


def images_per_row(batch: Mapping[str, Any]) -> Ints:
    """`(B,)`: images of each row; -1 in every row of a batch that holds none at all."""
    if batch.get(PIXELS) is None:
        return np.full(batch["prompt_ids"].size(0), -1)
    return np.asarray(batch["num_images"], np.int64)


def check_images(batch: Mapping[str, Any], fields: FieldTable) -> None:
    """Refuses image fields whose sections can't be told.

    Raises:
        BatchError: Names the key.
    """
    keys = _keys(batch, fields)
    if not keys:
        return
    rows = batch["prompt_ids"].size(0)
    for key in COUNTS:
        if batch.get(key) is not None and len(batch[key]) != rows:
            raise BatchError(f"The batch's {key!r} has {len(batch[key])} entries for {rows} rows.")
    if PIXELS not in keys or batch.get("num_images") is None:
        raise BatchError(
            f"The batch holds {', '.join(map(repr, keys))}, but {PIXELS if PIXELS not in keys else 'num_images'!r} is "
            "missing: which images belong to which row is not known. Set use_replay=False for this run."
        )
    for key, sections in _counts(batch, keys, fields, batch.get("num_tiles") is not None).items():
        if int(sections.sum()) != batch[key].size(0):
            raise BatchError(
                f"The batch's {key!r} has shape {tuple(batch[key].shape)}, but its rows have {int(sections.sum())} "
                "entries: this layout of images is not known. Set use_replay=False for this run."
            )


def cut_images(batch: Mapping[str, Any], fields: FieldTable, rows: slice) -> dict[str, torch.Tensor]:
    """Copies of the image fields of some rows; empty if these rows have no image.

    Where all rows have the same images, those of the first are kept. The tensor `num_images` (and `num_tiles`, where
    the batch has it) tells: it has one entry for each row kept.
    """
    numbers = images_per_row(batch)[rows]
    if not (numbers > 0).any():
        return {}
    keys = _keys(batch, fields)
    sections: dict[str, list[torch.Tensor]] = {
        key: [torch.tensor([number], dtype=torch.int32) for number in batch[key][rows]]
        for key in COUNTS
        if batch.get(key) is not None
    }
    for key, counts in _counts(batch, keys, fields, "num_tiles" in sections).items():
        sections[key] = list(torch.split(batch[key].detach(), counts.tolist()))[rows]
    return _together(sections, fields)


def join_images(parts: Sequence[Group], fields: FieldTable) -> dict[str, torch.Tensor]:
    """The image fields of all rows of all `parts`, in order; a part without them has no images."""
    pictured = [part for part in parts if PIXELS in part.tensors]
    if not pictured:
        return {}
    keys = [key for key in pictured[0].tensors if fields.is_image(key)]
    sections: dict[str, list[torch.Tensor]] = {key: [] for key in keys}
    for part in parts:
        for key, found in _sections(part, pictured[0], keys, fields).items():
            sections[key] += found
    return _together(sections, fields)


def compose_images(batch: Batch, fields: FieldTable, placements: Sequence[Placement]) -> Batch:
    """The image fields of `batch` with those of the placed groups in their rows.

    Raises:
        BatchError: TRL could not tell the layout of the composed batch.
    """
    keys = _keys(batch, fields)
    groups = [placed.group for placed in placements]
    if not keys:
        if any(PIXELS in group.tensors for group in groups):
            raise BatchError("A stored group has images and the batch has none; it must not be sampled.")
        return {}
    tiled = batch.get("num_tiles") is not None or any("num_tiles" in group.tensors for group in groups)
    columns = {"num_images": list(batch["num_images"])}
    if tiled:  # TRL leaves it out where every image has one tile
        columns["num_tiles"] = list(batch.get("num_tiles") or batch["num_images"])
    like = Group(
        {key: batch[key] for key in keys}
        | {key: torch.tensor(values, dtype=torch.int32) for key, values in columns.items()},
        frozenset(), np.zeros(0, np.int64), np.zeros(len(columns["num_images"]), np.int64),
    )  # fmt: skip
    per_row = any(_is_per_row(part) for part in (like, *groups))
    sections = _sections(like, like, keys, fields, per_row)
    for placed in placements:
        for key, found in _sections(placed.group, like, keys, fields, per_row).items():
            sections[key][placed.rows] = found[placed.part]
    composed: Batch = {key: _merge([part.to(batch[key]) for part in sections[key]], fields, key) for key in keys}
    for key in columns:
        composed[key] = [int(part) for part in sections[key]]
    numbers = composed["num_images"]
    if per_row and sum(numbers) == len(numbers) and set(numbers) != {1}:
        raise BatchError(
            f"Rows with {numbers} images, padded to one row of {PIXELS!r} each: TRL would take them for one entry an "
            "image. Mix no rows without images into this dataset, or set use_replay=False."
        )
    return composed


def _keys(batch: Mapping[str, Any], fields: FieldTable) -> list[str]:
    """The image fields that hold tensors."""
    return [key for key, value in batch.items() if value is not None and key not in COUNTS and fields.is_image(key)]


def _counts(
    batch: Mapping[str, Any],
    keys: Sequence[str],
    fields: FieldTable,
    tiled: bool,
) -> dict[str, Ints]:
    """Per image field, how many entries each row has."""
    images = np.asarray(batch["num_images"], np.int64)
    tiles = np.asarray(batch["num_tiles"], np.int64) if tiled else images
    flat = batch[PIXELS].size(0) == images.sum()
    return {key: _entries(key, batch, images, tiles, fields, tiled, not flat) for key in keys}


def _entries(
    key: str,
    held: Mapping[str, Any],
    images: Ints,
    tiles: Ints,
    fields: FieldTable,
    tiled: bool,
    per_row: bool,
) -> Ints:
    """How many entries of field `key` each row has, by TRL's rules; `held` are all fields."""
    layout = fields.spec(key).layout
    if layout != "pixels":
        return tiles if layout == "tile" else images
    if key != PIXELS:
        return tiles if "spatial_shapes" in held else np.ones_like(images)
    if "image_grid_thw" in held:
        patches = held["image_grid_thw"].prod(dim=-1).cpu().numpy()
        ends = np.concatenate([[0], patches.cumsum()])[np.concatenate([[0], images.cumsum()])]
        return np.asarray(np.diff(ends))
    if "image_position_ids" in held:
        return images
    if tiled:
        return tiles
    return np.ones_like(images) if per_row else images


def _is_per_row(group: Group) -> bool:
    """Whether the pixels can only be one entry a row: their number is that of the rows, and not that of the images."""
    if PIXELS not in group.tensors or set(group.tensors) & {
        "image_grid_thw",
        "image_position_ids",
        "num_tiles",
    }:
        return False
    count = group.tensors[PIXELS].size(0)
    return count == len(group.tensors["num_images"]) and count != int(group.tensors["num_images"].sum())


def _sections(
    group: Group,
    like: Group,
    keys: Sequence[str],
    fields: FieldTable,
    per_row: bool | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Per image field and counts, the section of each row of `group`; of a group without images they are empty."""
    rows = len(group.completion_lengths)
    held = group.tensors if PIXELS in group.tensors else {}
    per_row = any(map(_is_per_row, (group, like))) if per_row is None else per_row
    images = held["num_images"].cpu().numpy() if held else np.zeros(rows, np.int64)
    tiles = held["num_tiles"].cpu().numpy() if "num_tiles" in held else images
    counts = {"num_images": images, "num_tiles": tiles}
    sections = {}
    for key in dict.fromkeys([*keys, *(key for key in COUNTS if key in like.tensors)]):
        if key in COUNTS:
            found = [torch.tensor([number], dtype=torch.int32) for number in counts[key].tolist()]
        elif held and key not in held:
            raise BatchError(
                f"A stored group with images lacks {key!r}, which the batch holds; its processor differs."
            )
        elif held:
            tiled = "num_tiles" in like.tensors or "num_tiles" in held
            entries = _entries(key, held, images, tiles, fields, tiled, per_row)
            found = list(torch.split(held[key], entries.tolist()))
        else:  # a row without images has no entry, or one of zeros where every row has one
            blank = like.tensors[key]
            one = per_row if key == PIXELS else key == "pixel_attention_mask" and "spatial_shapes" not in like.tensors
            found = [blank.new_zeros((int(one), *blank.shape[1:]))] * rows
        sections[key] = found * rows if len(found) == 1 else found
    return sections


def _together(sections: Mapping[str, Sequence[torch.Tensor]], fields: FieldTable) -> dict[str, torch.Tensor]:
    """Sections of all rows as one tensor a field; only the first row's, where all rows have the same."""
    same = all(_equal(part, parts[0]) for parts in sections.values() for part in parts)
    return {key: _merge(parts[:1] if same else parts, fields, key) for key, parts in sections.items()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def _merge(parts: Sequence[torch.Tensor], fields: FieldTable, key: str) -> torch.Tensor:
    """All entries in one new tensor; smaller ones are padded at the end of each dimension, as TRL's processors do."""
    sizes = [part.shape[1:] for part in parts if part.size(0)] or [parts[0].shape[1:]]
    largest = [max(size) for size in zip(*sizes, strict=True)]
    padded = [_grow(part, largest, fields.pad_value(fields.spec(key))) for part in parts]
    return torch.cat(padded).contiguous()


def _grow(part: torch.Tensor, sizes: Sequence[int], pad: float) -> torch.Tensor:
    if list(part.shape[1:]) == list(sizes):
        return part
    if part.size(0) == 0:
        return part.new_zeros((0, *sizes))
    missing = [size - have for size, have in zip(sizes, part.shape[1:], strict=True)]
    return functional.pad(
        part,
        [amount for right in reversed(missing) for amount in (0, right)],
        value=pad,
    )
