"""Cuts groups out of TRL's batch and composes batches from groups. The only code that pads TRL's batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from .. import compat
from ..base.progress import to_cpu
from ..data.types import (
    ADVANTAGES,
    IMAGE_LAYOUTS,
    PIXELS,
    TOKEN_ADVANTAGES,
    TOKEN_TYPES,
    Batch,
    Bools,
    FieldSpec,
    FieldTable,
    Group,
    Ints,
    Placement,
)
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


MASKS = ("completion_mask", "tool_mask")
"""Of completion tokens. A group holds one where not all of its values are 1."""


class Widths(NamedTuple):
    """The padded widths of a batch's prompts and completions."""

    prompt: int
    completion: int


def row_lengths(batch: Mapping[str, Any], pad_token_id: int, rows: Any = slice(None)) -> tuple[Ints, Ints]:
    """Count the real tokens of some rows of a batch on the CPU: `(prompt_lengths, completion_lengths)`, both `(n,)`.

    A completion whose mask is all zero (`mask_truncated_completions`) ends before its trailing pad tokens.
    """
    real = (_array(batch["completion_mask"]) != 0)[rows]  # (n, C)
    masked_out = ~real.any(axis=1, keepdims=True)
    if masked_out.any():
        real = np.where(masked_out, (_array(batch["completion_ids"]) != pad_token_id)[rows], real)
    return _from_first_to_end((_array(batch["prompt_mask"]) != 0)[rows]), _from_first_to_end(real[:, ::-1])


def _from_first_to_end(real: Bools) -> Ints:
    """`(B,)` int64: how many positions there are from the first that is set to the end of each row of `real`, `(B,
    T)`."""
    return np.where(real.any(axis=1), real.shape[1] - real.argmax(axis=1), 0)


def loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the tokens that the loss trains on, `(B, C)`."""
    mask: torch.Tensor = batch["completion_mask"]
    if "tool_mask" in batch:
        mask = mask * batch["tool_mask"]
    return mask


def trained_tokens(group: Group) -> torch.Tensor:
    """Return the mask of a stored group's tokens that the loss trains on, `(tokens,)`, unless their row is masked."""
    trained = torch.ones_like(group.tensors["completion_ids"], dtype=torch.bool)
    for key in MASKS:
        if key in group.tensors:
            trained &= group.tensors[key].bool()
    return trained


def padding(batch: Mapping[str, Any]) -> float:
    """Return the share of pad tokens among all positions."""
    masks = [_array(batch[side]) for side in ("prompt_mask", "completion_mask")]
    real = sum(int(np.count_nonzero(mask)) for mask in masks)
    return 1.0 - real / sum(int(mask.size) for mask in masks)


def check(batch: Batch, fields: FieldTable) -> dict[str, FieldSpec]:
    """Return the spec of each key, after checking that every tensor has the shape of its layout.

    Raises:
        BatchError: An unknown key, complex numbers, or a shape that the key's layout does not allow.
    """
    specs = fields.of(batch)
    first = next(iter(batch))
    if first != "prompt_ids":
        raise BatchError(f"The batch's first key is {first!r}, not 'prompt_ids', from which TRL takes its size.")
    rows = batch["prompt_ids"].size(0)
    widths = _widths(batch)
    for key, spec in specs.items():
        if spec.layout in IMAGE_LAYOUTS:
            continue
        if batch[key].is_complex():
            raise BatchError(
                f"The batch's {key!r} is complex, which no file can hold: pass it through torch.view_as_real."
            )
        shape = tuple(batch[key].shape)
        expected = _expected_shape(spec, rows, widths)
        if shape == expected:
            continue
        if spec.layout == "row" and shape[:1] == expected and (key != ADVANTAGES or shape[1:] == (1,)):
            continue  # a row's value may have dimensions of its own
        raise BatchError(f"The batch's {key!r} has shape {shape}; the layout {spec.layout!r} requires {expected}.")
    check_images(batch, fields)
    return specs


def _widths(batch: Batch) -> Widths:
    return Widths(batch["prompt_ids"].size(1), batch["completion_ids"].size(1))


def _expected_shape(spec: FieldSpec, rows: int, widths: Widths) -> tuple[int, ...]:
    """Return the shape of a field's tensor; for the layout `"row"` only the first dimension."""
    if spec.layout == "scalar":
        return ()
    if spec.layout == "prompt":
        return (rows, widths.prompt)
    if spec.layout == "completion":
        return (rows, widths.completion)
    if spec.layout == "sequence":
        return (rows, widths.prompt + widths.completion)
    return (rows,)


def batch_to_cpu(
    batch: Batch, fields: FieldTable, beside: Sequence[torch.Tensor] = ()
) -> tuple[Batch, list[torch.Tensor]]:
    """Return the batch with its texts on the CPU, and what lies beside it, copied in one go; images stay where they
    are."""
    away: dict[Any, torch.Tensor] = dict(enumerate(beside))
    for key, value in batch.items():
        if torch.is_tensor(value) and value.device.type != "cpu" and not fields.is_image(key):
            away[key] = value
    on_cpu = to_cpu(away)
    found = [on_cpu.pop(number) for number in range(len(beside))]
    return {**batch, **on_cpu} if on_cpu else batch, found


def cut(batch: Batch, fields: FieldTable, parts: Sequence[slice]) -> list[Group]:
    """Cut unpadded copies of some rows out of the batch, sharing no memory with it: of texts on the CPU, of images
    where they are.

    A field is cut for all parts at once. Of one with an implied value nothing is kept where all its values are that,
    and of a prompt that all rows of a part share one copy.

    Args:
        batch (`dict`): Rows of a group adjacent, as TRL returns them; texts on the CPU.
        fields ([`FieldTable`]): How to cut each key.
        parts (`Sequence[slice]`): The rows of each group, or of the part of a group that this process has.
    """
    if not parts:
        return []
    specs = check(batch, fields)
    places = _numbers(parts)
    prompts, completions = row_lengths(batch, fields.pad_token_id, places)
    real = _real_positions(specs, _widths(batch), places, prompts, completions)
    lengths = {**_by_layout(prompts, completions), "row": np.ones_like(places)}
    ends = np.cumsum([rows.stop - rows.start for rows in parts])
    text = {key: _array(batch[key].detach()) for key, spec in specs.items() if _is_text(spec)}
    of_prompts = [values for key, values in text.items() if specs[key].layout == "prompt"]
    keys = set(text)
    if ADVANTAGES in text and specs[ADVANTAGES].layout != "row":
        keys.add(TOKEN_ADVANTAGES)
    groups = []
    for rows, begin, end in zip(parts, [0, *ends[:-1]], ends, strict=True):
        images = cut_images(batch, fields, rows)
        held = frozenset(keys | images.keys() if images else keys - TOKEN_TYPES)  # without images, these are zeros
        same = all(_repeats_one(values[rows]) for values in of_prompts)
        groups.append(Group(images, held, prompts[begin : begin + 1 if same else end], completions[begin:end]))
    for key, values in text.items():
        spec = specs[key]
        flat = values[places] if spec.layout == "row" else values.reshape(-1)[real[spec.layout]]
        if spec.implied is not None and (flat == spec.implied).all():
            continue
        kept = torch.from_numpy(flat).to(getattr(torch, spec.dtype) if spec.dtype else batch[key].dtype)
        stops = lengths[spec.layout].cumsum()[ends - 1].tolist()
        for group, begin, end in zip(groups, [0, *stops[:-1]], stops, strict=True):
            if key not in group.keys or (spec.implied is not None and (flat[begin:end] == spec.implied).all()):
                continue
            is_shared = spec.layout == "prompt" and _has_one_prompt(group)
            group.tensors[key] = kept[begin : begin + int(group.prompt_lengths[0]) if is_shared else end]
    return groups


def _numbers(parts: Iterable[slice]) -> Ints:
    """Return the numbers of some rows."""
    return np.array([row for rows in parts for row in range(rows.start, rows.stop)], np.int64)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor on the CPU as an array; NumPy has no bfloat16, whose numbers float32 has, too."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _repeats_one(rows: NDArray[Any]) -> bool:
    """Return whether all rows are the same."""
    one: bytes = rows[0].tobytes()
    return rows.tobytes() == one * len(rows)


def _real_positions(
    specs: Mapping[str, FieldSpec], widths: Widths, places: Ints, prompts: Ints, completions: Ints
) -> dict[str, Ints]:
    """Return the real positions of some rows in a padded field, for each layout that a field has, `(numbers,)` int64:
    indices of the flat field.

    Args:
        specs (`Mapping[str, FieldSpec]`): The fields.
        widths ([`Widths`]): Of the batch.
        places, prompts, completions (`(n,)` int64): The rows, and the lengths of their two sides.
    """
    begins = widths.prompt - prompts
    runs: dict[str, tuple[int, Ints | int, Ints]] = {
        "prompt": (widths.prompt, begins, prompts),
        "completion": (widths.completion, 0, completions),
        "sequence": (sum(widths), begins, prompts + completions),
    }
    layouts = {spec.layout for spec in specs.values()}
    return {
        layout: _positions(places * width + first, lengths)
        for layout, (width, first, lengths) in runs.items()
        if layout in layouts
    }


def _positions(begins: Ints, lengths: Ints) -> Ints:
    """Return the numbers of runs, one after the other."""
    ends = lengths.cumsum()
    return np.asarray(np.repeat(begins - ends + lengths, lengths) + np.arange(ends[-1]))


def _is_text(spec: FieldSpec) -> bool:
    """Return whether the field is a row tensor of tokens or values: neither of images nor the same for all rows."""
    return spec.layout != "scalar" and spec.layout not in IMAGE_LAYOUTS


def join(parts: Sequence[Group], fields: FieldTable) -> Group:
    """Join the rows of all `parts`, in order, into one group."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    shared = all(_same_prompt(part, first, fields) for part in parts)
    tensors: dict[str, torch.Tensor] = {}
    for key in _text_keys(parts, fields):
        spec = fields.spec_in(first.keys, key)
        if spec.layout == "prompt" and shared:
            tensors[key] = first.tensors[key]
            continue
        like = next(part.tensors[key] for part in parts if key in part.tensors)
        tensors[key] = _joined([(part, slice(0, len(part.completion_lengths))) for part in parts], spec, like)
    images = join_images(parts, fields)
    keys = _joined_keys(parts, images)
    prompts = [first.prompt_lengths] if shared else [_prompt_lengths(part) for part in parts]
    completions = [part.completion_lengths for part in parts]
    return Group(tensors | images, keys, np.concatenate(prompts), np.concatenate(completions))


def take_rows(group: Group, rows: Sequence[int], fields: FieldTable) -> Group:
    """Return a group of some rows of `group`, in the order of `rows`."""
    tensors: dict[str, torch.Tensor] = {}
    index = np.asarray(rows, np.int64)
    shared = _has_one_prompt(group)
    for key, tensor in group.tensors.items():
        if fields.is_image(key):
            continue
        spec = fields.spec_in(group.keys, key)
        if spec.layout == "prompt" and shared:
            tensors[key] = tensor
            continue
        tensors[key] = _joined([(group, slice(row, row + 1)) for row in rows], spec, tensor)
    images = take_images(group, rows, fields)
    return Group(
        tensors | images,
        group.keys,
        group.prompt_lengths if shared else group.prompt_lengths[index],
        group.completion_lengths[index],
    )


def _joined(parts: Iterable[tuple[Group, slice]], spec: FieldSpec, like: torch.Tensor) -> torch.Tensor:
    """Return one field's values of some rows of groups, with the dtype of `like`."""
    values = [_values(group, rows, spec, _array(like), _counts(group)) for group, rows in parts]
    return torch.from_numpy(np.concatenate([*itertools.chain(*values)])).to(like.dtype)


def _joined_keys(parts: Sequence[Group], images: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the keys that the joined group can restore: those that all parts can, and those of images."""
    keys = [part.keys for part in parts]
    joined = frozenset.intersection(*keys)
    if not images:
        return joined
    token_types = frozenset.union(*keys) & TOKEN_TYPES  # a part without images lacks them
    return joined | frozenset(images) | token_types


def _text_keys(parts: Sequence[Group], fields: FieldTable) -> list[str]:
    """Return the fields that some parts hold as tensors, except images."""
    keys: dict[str, None] = {}
    for part in parts:
        keys |= dict.fromkeys(part.tensors)
    return [key for key in keys if not fields.is_image(key)]


def _has_one_prompt(group: Group) -> bool:
    return len(group.prompt_lengths) == 1


def _same_prompt(one: Group, other: Group, fields: FieldTable) -> bool:
    """Return whether the rows of `one` share a prompt, and it is that of `other`."""
    if not _has_one_prompt(one):
        return False
    keys = [key for key in one.keys if fields.spec(key).layout == "prompt"]
    return all(_same(one, other, key) for key in keys)


def _same(group: Group, other_group: Group, key: str) -> bool:
    """Return whether two groups hold the same values of one field, or neither holds any."""
    one = group.tensors.get(key)
    other = other_group.tensors.get(key)
    if one is other:
        return True
    if one is None or other is None:
        return False
    return bool(torch.equal(one, other))


def _counts(part: Group) -> dict[str, Ints]:
    """Return the number of values that a padded field has in each row, by layout."""
    return _by_layout(_prompt_lengths(part), part.completion_lengths)


def _by_layout(prompts: Ints, completions: Ints) -> dict[str, Ints]:
    """Return the lengths of rows in padded fields, by layout."""
    return {"prompt": prompts, "completion": completions, "sequence": prompts + completions}


def _prompt_lengths(group: Group) -> Ints:
    """Return the prompt length of each row, `(G,)`, also if all rows share one prompt."""
    lengths, rows = group.prompt_lengths, len(group.completion_lengths)
    return lengths if len(lengths) == rows else lengths.repeat(rows)


def compose(
    batch: Batch, fields: FieldTable, placements: Sequence[Placement], multiple_of: int | None = None
) -> Batch:
    """Return the batch with each placed group in its slot, widened if a stored row needs it. Nothing is truncated. It
    has image fields where a row has images.

    The batch's tensors are left as they are: what changes is a new tensor. Without placements, the batch itself
    returns.

    Args:
        batch (`dict`): As TRL returns it, its texts on the CPU. `num_items_in_batch` is passed through; the session
            corrects it.
        fields ([`FieldTable`]): How to pad each key.
        placements (`Sequence[Placement]`): With disjoint rows.
        multiple_of (`int`, *optional*): The trainer's `pad_to_multiple_of`.

    Raises:
        BatchError: A group lacks a key of the batch, or holds other numbers of values than its lengths tell.
    """
    if not placements:
        return batch
    specs = {key: spec for key, spec in fields.of(batch).items() if _is_text(spec)}
    _refuse_missing(placements, specs)
    old = _widths(batch)
    counts = [_counts(placed.group) for placed in placements]
    prompts, completions = (
        np.concatenate([of_rows[side][placed.part] for placed, of_rows in zip(placements, counts, strict=True)])
        for side in ("prompt", "completion")
    )
    places = _numbers(placed.rows for placed in placements)
    new = Widths(
        _rounded_up(old.prompt, int(prompts.max()), multiple_of),
        _rounded_up(old.completion, int(completions.max()), multiple_of),
    )
    real = _real_positions(specs, new, places, prompts, completions)
    composed = dict(batch)
    for key, spec in specs.items():
        pad = fields.pad_value(spec)
        widened = _widen(batch[key].detach(), spec, old, new, pad)
        out = _array(widened)
        target, positions = (out, places) if spec.layout == "row" else (out.reshape(-1), real[spec.layout])
        out[places] = pad
        if any(key in placed.group.tensors for placed in placements):
            values = [
                _values(placed.group, placed.part, spec, out, of_rows)
                for placed, of_rows in zip(placements, counts, strict=True)
            ]
            flat = np.concatenate([*itertools.chain(*values)])
            if len(flat) != len(positions):  # the tokens of further rows would shift
                raise BatchError(
                    f"Stored groups hold {len(flat)} values of {key!r} where their lengths tell {len(positions)}: "
                    "the checkpoint that they came from is damaged. Start with an empty buffer."
                )
            target[positions] = flat
        else:
            target[positions] = spec.implied or 0
        composed[key] = torch.from_numpy(out).to(widened.dtype)
    images = compose_images(batch, fields, placements)
    if images and not any(images[IMAGES]):  # a model fails at pixels of no image
        return without_images(composed, fields)
    return composed | images


def _refuse_missing(placements: Sequence[Placement], specs: Mapping[str, FieldSpec]) -> None:
    for placed in placements:
        keys, tensors = placed.group.keys | TOKEN_TYPES, placed.group.tensors
        for key, spec in specs.items():
            if key not in keys or (spec.implied is None and key not in tensors):
                raise BatchError(f"A stored group lacks {key!r}, which the batch holds; it must not be sampled.")


def with_stored_fields(
    batch: Batch, fields: FieldTable, placements: Sequence[Placement]
) -> tuple[Batch, Sequence[Placement]]:
    """Return the batch, and the placed groups, with token-level fields that only some of these groups have, such as
    the tool mask of a file: all other rows get the implied value."""
    added: Batch = {}
    for placed in placements:
        for key, stored in placed.group.tensors.items():
            spec = None if key in batch and batch[key] is not None else fields.spec(key)
            if spec is not None and spec.layout == "completion" and spec.implied is not None:
                added[key] = implied_values(batch, spec, stored.dtype)
    if not added:
        return batch, placements
    groups = [replace(placed.group, keys=placed.group.keys | added.keys()) for placed in placements]
    return batch | added, [replace(placed, group=group) for placed, group in zip(placements, groups, strict=True)]


def implied_values(batch: Batch, spec: FieldSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return a text field of the batch filled with the implied value."""
    shape = _expected_shape(spec, batch["prompt_ids"].size(0), _widths(batch))
    assert spec.implied is not None
    return torch.full(shape, spec.implied, dtype=dtype, device=batch["prompt_ids"].device)


def _rounded_up(width: int, needed: int, multiple_of: int | None) -> int:
    """Return `width`, or the next multiple that holds `needed`."""
    if needed <= width:
        return width
    multiple = multiple_of or 1
    return math.ceil(needed / multiple) * multiple


def _widen(tensor: torch.Tensor, spec: FieldSpec, old: Widths, new: Widths, pad: float) -> torch.Tensor:
    """Return a copy of `tensor`, padded from the widths `old` to `new`: prompts on the left, completions on the
    right."""
    left = new.prompt - old.prompt
    right = new.completion - old.completion
    if spec.layout == "prompt":
        right = 0
    elif spec.layout == "completion":
        left = 0
    elif spec.layout == "row":
        left = right = 0
    if left == 0 and right == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    return functional.pad(tensor, (left, right), value=pad)


def _values(
    group: Group, rows: slice, spec: FieldSpec, like: NDArray[Any], counts: Mapping[str, Ints]
) -> list[NDArray[Any]]:
    """Return one field's real values of some rows of a group, in parts: flat or, of a field with one value per row, in
    the shape of the rows of `like`; `counts` are those of the group's rows, by layout."""
    of_tokens = spec.name == ADVANTAGES and TOKEN_ADVANTAGES in group.keys
    is_row = spec.layout == "row"
    if is_row and of_tokens:
        raise BatchError(
            "A stored group has per-token advantages, but the batch has one per row: all batches of a run must "
            "have the same kind, also after resuming. Start with an empty buffer."
        )
    lengths = np.ones_like(group.completion_lengths) if is_row else counts[spec.layout]
    stored = group.tensors.get(spec.name)
    if stored is None:
        shape = like.shape[1:] if is_row else ()
        return [np.full((lengths[rows].sum(), *shape), spec.implied or 0, like.dtype)]
    values = _array(stored)
    if is_row:
        if values.size == len(values) and like.size == len(like):
            values = values.reshape(-1, *like.shape[1:])  # (G,) of a file where the batch has (B, 1)
        if values.shape[1:] != like.shape[1:]:
            raise BatchError(f"A stored {spec.name!r} has the shape {values.shape} where the batch has {like.shape}.")
        return [values[rows]]
    if spec.name == ADVANTAGES and not of_tokens:
        return [values.reshape(len(lengths))[rows].repeat(lengths[rows])]  # of a file: one a row
    if spec.layout == "prompt" and _has_one_prompt(group):
        return [values] * len(lengths[rows])
    if rows == slice(0, len(lengths)):  # all that there is, so that one value too many is seen
        return [values]
    begin = int(lengths[: rows.start].sum())
    return [values[begin : begin + int(lengths[rows].sum())]]
