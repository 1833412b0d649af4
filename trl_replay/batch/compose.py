"""Cuts groups out of TRL's batch and composes batches from groups. The only code that pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..errors import BatchError
from ..fields import IMAGE_LAYOUTS, TOKEN_TYPES, FieldSpec, FieldTable
from ..types import Batch, Group, Ints, Placement
from .images import check_images, compose_images, cut_images, join_images


def row_lengths(batch: Mapping[str, Any], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real tokens of each row: `(prompt_lengths, completion_lengths)`, both `(B,)` int64.

    A completion whose mask is all zero (`mask_truncated_completions`) ends before its trailing pad tokens.
    """
    prompt_mask, mask, ids = (
        batch["prompt_mask"],
        batch["completion_mask"],
        batch["completion_ids"],
    )
    prompt_positions = torch.arange(prompt_mask.size(1), 0, -1, device=prompt_mask.device)
    positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
    prompt_lengths = (prompt_mask.ne(0) * prompt_positions).amax(dim=1, keepdim=False)
    real = torch.where(mask.ne(0).any(dim=1, keepdim=True), mask.ne(0), ids.ne(pad_token_id))
    return prompt_lengths, (real * positions).amax(dim=1)


def loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """`(B, C)`: the tokens that the loss trains on."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def padding(batch: Mapping[str, Any]) -> float:
    """The share of pad tokens among all positions."""
    masks = (batch["prompt_mask"], batch["completion_mask"])
    real = sum(int(mask.sum()) for mask in masks)
    positions = sum(int(mask.numel()) for mask in masks)
    return 1.0 - real / positions


def check(batch: Batch, fields: FieldTable) -> dict[str, FieldSpec]:
    """The spec of each key; every tensor must have the shape of its layout.

    Raises:
        BatchError: An unknown key, or a shape that its layout does not allow.
    """
    specs = fields.of(batch)
    if next(iter(batch)) != "prompt_ids":
        raise BatchError(
            f"The batch's first key is {next(iter(batch))!r}, not 'prompt_ids', from which TRL takes its size."
        )
    rows, width = batch["prompt_ids"].shape
    columns = {"prompt": width, "completion": batch["completion_ids"].size(1)}
    columns["sequence"] = columns["prompt"] + columns["completion"]
    for key, spec in specs.items():
        if spec.layout in IMAGE_LAYOUTS:
            continue
        shape = tuple(batch[key].shape)
        expected = () if spec.layout == "scalar" else (rows, columns[spec.layout]) if spec.layout in columns else None
        if (
            shape != expected
            if expected is not None
            else shape[:1] != (rows,) or (key == "advantages" and len(shape) != 1)
        ):
            want = expected if expected is not None else f"({rows},)"
            raise BatchError(f"The batch's {key!r} has shape {shape}; the layout {spec.layout!r} asks for {want}.")
    check_images(batch, fields)
    return specs


def cut(batch: Batch, fields: FieldTable, parts: Sequence[slice]) -> list[Group]:
    """Unpadded copies of some rows of the batch, on the batch's device; nothing is shared with it.

    Args:
        batch (`dict`): Rows of a group adjacent, as TRL returns them.
        fields ([`FieldTable`]): How to cut each key.
        parts (`Sequence[slice]`): The rows of each group, or of the part of a group that this process has.
    """
    if not parts:
        return []
    specs = check(batch, fields)
    prompt_lengths, completion_lengths = (lengths.cpu().numpy() for lengths in row_lengths(batch, fields.pad_token_id))
    return [
        _cut_one(
            batch,
            specs,
            cut_images(batch, fields, rows),
            rows,
            prompt_lengths[rows],
            completion_lengths[rows],
        )
        for rows in parts
    ]


def join(parts: Sequence[Group], fields: FieldTable) -> Group:
    """One group of the rows of all `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    if (
        len({tensor.device for part in parts for tensor in part.tensors.values()}) > 1
    ):  # some came from other processes
        parts = [part.map(lambda tensor: tensor.cpu()) for part in parts]
    sizes = [len(part.completion_lengths) for part in parts]
    first = parts[0]
    shared = all(len(part.prompt_lengths) == 1 and _same_prompt(part, first, fields) for part in parts)
    prompts = [np.broadcast_to(part.prompt_lengths, size) for part, size in zip(parts, sizes, strict=True)]
    completions = [part.completion_lengths for part in parts]
    tensors: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(key for part in parts for key in part.tensors if not fields.is_image(key)):
        spec = fields.spec(key)
        if spec.layout == "prompt" and shared:
            tensors[key] = first.tensors[key]
            continue
        flat = []
        for part, size, prompt in zip(parts, sizes, prompts, strict=True):
            tensor = part.tensors.get(key)
            if tensor is None:  # its values are all implied
                lengths = {
                    "prompt": prompt,
                    "sequence": prompt + part.completion_lengths,
                }.get(spec.layout, part.completion_lengths)
                like = next(other.tensors[key] for other in parts if key in other.tensors)
                tensor = like.new_full((int(lengths.sum()),), spec.implied or 0)
            elif spec.layout == "prompt" and len(part.prompt_lengths) < size:
                tensor = tensor.repeat(size)
            flat.append(tensor)
        tensors[key] = torch.cat(flat)
    keys = frozenset.intersection(*(part.keys for part in parts))
    images = join_images(parts, fields)
    if images:  # a part without images lacks these keys
        keys |= frozenset(images) | frozenset(key for part in parts for key in part.keys & TOKEN_TYPES)
    return Group(
        {**tensors, **images},
        keys,
        first.prompt_lengths if shared else np.concatenate(prompts),
        np.concatenate(completions),
    )


def _same_prompt(one: Group, other: Group, fields: FieldTable) -> bool:
    """Whether two groups, each with one prompt for all rows, have the same prompt tensors."""
    keys = [key for key in one.keys if fields.spec(key).layout == "prompt"]
    pairs = [(one.tensors.get(key), other.tensors.get(key)) for key in keys]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _cut_one(
    batch: Batch,
    specs: dict[str, FieldSpec],
    images: dict[str, torch.Tensor],
    rows: slice,
    prompts: Ints,
    completions: Ints,
) -> Group:
    if not images:  # in a batch that has some, a row without images is all zeros
        specs = {key: spec for key, spec in specs.items() if key not in TOKEN_TYPES}
    specs = {key: spec for key, spec in specs.items() if spec.layout not in IMAGE_LAYOUTS}
    tensors = dict(images)
    widths = (batch["prompt_ids"].size(1), batch["completion_ids"].size(1))
    prompt_blocks = [batch[key][rows] for key, spec in specs.items() if spec.layout == "prompt"]
    shared = all(bool((block == block[:1]).all()) for block in prompt_blocks)
    prompt_lengths = prompts[:1] if shared else prompts
    for key, spec in specs.items():
        if spec.layout == "scalar":
            continue
        block = flat = batch[key][rows]
        if spec.layout == "prompt":
            flat = block[: len(prompt_lengths)][_real(spec, prompt_lengths, completions, widths, block.device)]
        elif spec.layout != "row":
            flat = block[_real(spec, prompts, completions, widths, block.device)]
        if spec.implied is not None and bool((flat == spec.implied).all()):
            continue
        dtype = getattr(torch, spec.dtype) if spec.dtype else flat.dtype
        tensors[key] = flat.detach().to(dtype, copy=True).contiguous()
    keys = frozenset(images) | frozenset(key for key, spec in specs.items() if spec.layout != "scalar")
    return Group(tensors, keys, prompt_lengths.copy(), completions.copy())


def _real(
    spec: FieldSpec,
    prompts: Ints,
    completions: Ints,
    widths: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """`(rows, width)` bool: the real positions of a field whose batch is padded to `widths`."""
    prompt_width, completion_width = widths
    left = np.arange(prompt_width)[None] >= prompt_width - prompts[:, None]
    right = np.arange(completion_width)[None] < completions[:, None]
    parts = {
        "prompt": [left],
        "completion": [right],
        "sequence": [left, right],
    }[spec.layout]
    return torch.from_numpy(np.concatenate(parts, axis=1)).to(device)


def compose(
    batch: Batch,
    fields: FieldTable,
    placements: Sequence[Placement],
    multiple_of: int | None = None,
) -> Batch:
    """The batch with each placed group in its slot, widened where a stored row needs it. Nothing is cut off.

    The batch's tensors are left as they are: what changes is a new tensor. Without placements, the batch itself
    returns.

    Args:
        batch (`dict`): As TRL returns it. `num_items_in_batch` is passed through; the session corrects it.
        fields ([`FieldTable`]): How to pad each key.
        placements (`Sequence[Placement]`): With disjoint rows.
        multiple_of (`int`, *optional*): The trainer's `pad_to_multiple_of`.

    Raises:
        BatchError: A group lacks a key of the batch.
    """
    if not placements:
        return batch
    specs = check(batch, fields)
    old = (batch["prompt_ids"].size(1), batch["completion_ids"].size(1))
    longest = (
        max(int(placed.group.prompt_lengths.max()) for placed in placements),
        max(int(placed.group.completion_lengths[placed.part].max()) for placed in placements),
    )
    new = (
        _wider(old[0], longest[0], multiple_of),
        _wider(old[1], longest[1], multiple_of),
    )
    composed = dict(batch)
    for key, spec in specs.items():
        if spec.layout == "scalar" or spec.layout in IMAGE_LAYOUTS:
            continue
        pad = fields.pad_value(spec)
        out = _widen(batch[key], spec, old, new, pad)
        for placed in placements:
            out[placed.rows] = _block(placed.group, spec, new, pad, out)[placed.part]
        composed[key] = out
    return composed | compose_images(batch, fields, placements)


def _wider(width: int, needed: int, multiple_of: int | None) -> int:
    """`width`, or the next multiple that holds `needed`."""
    multiple = multiple_of or 1
    return width if needed <= width else -(-needed // multiple) * multiple


def _widen(
    tensor: torch.Tensor,
    spec: FieldSpec,
    old: tuple[int, int],
    new: tuple[int, int],
    pad: float,
) -> torch.Tensor:
    """A copy of `tensor`, padded from the widths `old` to `new`: prompts on the left, completions on the right."""
    left, right = new[0] - old[0], new[1] - old[1]
    if spec.layout == "prompt" and left:
        return functional.pad(tensor, (left, 0), value=pad)
    if spec.layout == "completion" and right:
        return functional.pad(tensor, (0, right), value=pad)
    if spec.layout == "sequence" and (left or right):
        return functional.pad(tensor, (left, right), value=pad)
    return tensor.clone()


def _block(
    group: Group,
    spec: FieldSpec,
    widths: tuple[int, int],
    pad: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """All rows of one field of the group, padded to `widths`, of the dtype and on the device of `like`.

    Rows longer than `widths` are cut: none of those that are placed here (the rest of the group is on other ranks).
    """
    if spec.name not in group.keys and spec.name not in TOKEN_TYPES:
        raise BatchError(f"A stored group lacks {spec.name!r}, which the batch holds; it must not be sampled.")
    stored = group.tensors.get(spec.name)
    if spec.layout == "row" and stored is not None:
        if stored.shape[1:] != like.shape[1:]:
            raise BatchError(
                f"A stored {spec.name!r} has the shape {tuple(stored.shape)} where the batch has {tuple(like.shape)}."
            )
        return stored.to(like)
    size = len(group.completion_lengths)
    count = len(group.prompt_lengths) if spec.layout == "prompt" else size
    prompts = group.prompt_lengths if spec.layout == "prompt" else np.broadcast_to(group.prompt_lengths, size)
    beyond = max(int(group.completion_lengths.max()) - widths[1], 0)
    real = _real(
        spec,
        prompts,
        group.completion_lengths,
        (widths[0], widths[1] + beyond),
        like.device,
    )
    block = like.new_full((count, real.size(1)), pad)
    block[real] = stored.to(like) if stored is not None else like.new_full((), spec.implied or 0)
    return block[:, : block.size(1) - (beyond if spec.layout != "prompt" else 0)].expand(size, -1)
