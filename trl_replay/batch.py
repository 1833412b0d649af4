"""Cuts groups out of TRL's batch and composes batches from groups. The only code that pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .errors import BatchError
from .fields import FieldSpec, FieldTable
from .types import Batch, Group, Ints, Placement


def row_lengths(batch: Mapping[str, Any], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real tokens of each row: `(prompt_lengths, completion_lengths)`, both `(B,)` int64.

    A completion whose mask is all zero (`mask_truncated_completions`) ends before its trailing pad tokens.
    """
    prompt_mask, mask, ids = batch["prompt_mask"], batch["completion_mask"], batch["completion_ids"]
    prompt_positions = torch.arange(prompt_mask.size(1), 0, -1, device=prompt_mask.device)
    positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
    prompt_lengths = (prompt_mask.ne(0) * prompt_positions).amax(dim=1, keepdim=False)
    real = torch.where(mask.ne(0).any(dim=1, keepdim=True), mask.ne(0), ids.ne(pad_token_id))
    return prompt_lengths, (real * positions).amax(dim=1)


def loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """`(B, C)`: the tokens that the loss trains on."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


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
        shape = tuple(batch[key].shape)
        expected = () if spec.layout == "scalar" else (rows, columns[spec.layout]) if spec.layout in columns else None
        if (
            shape != expected
            if expected is not None
            else shape[:1] != (rows,) or (key == "advantages" and len(shape) != 1)
        ):
            want = expected if expected is not None else f"({rows},)"
            raise BatchError(f"The batch's {key!r} has shape {shape}; the layout {spec.layout!r} asks for {want}.")
    return specs


def cut(batch: Batch, fields: FieldTable, groups: Sequence[int], num_generations: int) -> list[Group]:
    """Unpadded copies of some groups of the batch, on the batch's device; nothing is shared with it.

    Args:
        batch (`dict`): Rows of a group adjacent, as TRL returns them.
        fields ([`FieldTable`]): How to cut each key.
        groups (`Sequence[int]`): Which groups; group `g` has the rows `g * num_generations` up to the next group's.
        num_generations (`int`): Rows of a group.
    """
    if not groups:
        return []
    specs = check(batch, fields)
    prompt_lengths, completion_lengths = (lengths.cpu().numpy() for lengths in row_lengths(batch, fields.pad_token_id))
    slices = [slice(group * num_generations, (group + 1) * num_generations) for group in groups]
    return [_cut_one(batch, specs, rows, prompt_lengths[rows], completion_lengths[rows]) for rows in slices]


def _cut_one(batch: Batch, specs: dict[str, FieldSpec], rows: slice, prompts: Ints, completions: Ints) -> Group:
    tensors: dict[str, torch.Tensor] = {}
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
    keys = frozenset(key for key, spec in specs.items() if spec.layout != "scalar")
    return Group(tensors, keys, prompt_lengths.copy(), completions.copy())


def _real(
    spec: FieldSpec, prompts: Ints, completions: Ints, widths: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """`(rows, width)` bool: the real positions of a field whose batch is padded to `widths`."""
    prompt_width, completion_width = widths
    left = np.arange(prompt_width)[None] >= prompt_width - prompts[:, None]
    right = np.arange(completion_width)[None] < completions[:, None]
    parts = {"prompt": [left], "completion": [right], "sequence": [left, right]}[spec.layout]
    return torch.from_numpy(np.concatenate(parts, axis=1)).to(device)


def compose(
    batch: Batch,
    fields: FieldTable,
    placements: Sequence[Placement],
    num_generations: int,
    multiple_of: int | None = None,
) -> Batch:
    """The batch with each placed group in its slot, widened where a stored row needs it. Nothing is cut off.

    The batch's tensors are left as they are: what changes is a new tensor. Without placements the batch itself
    returns.

    Args:
        batch (`dict`): As TRL returns it. `num_items_in_batch` is passed through; the session corrects it.
        fields ([`FieldTable`]): How to pad each key.
        placements (`Sequence[Placement]`): Distinct slots.
        num_generations (`int`): Rows of a group.
        multiple_of (`int`, *optional*): The trainer's `pad_to_multiple_of`.

    Raises:
        BatchError: A group lacks a key of the batch.
    """
    if not placements:
        return batch
    specs = check(batch, fields)
    old = (batch["prompt_ids"].size(1), batch["completion_ids"].size(1))
    needed = (
        max([old[0], *(int(placed.group.prompt_lengths.max()) for placed in placements)]),
        max([old[1], *(int(placed.group.completion_lengths.max()) for placed in placements)]),
    )
    new = tuple(-(-width // (multiple_of or 1)) * (multiple_of or 1) if width > before else before
                for width, before in zip(needed, old, strict=True))  # fmt: skip
    composed: Batch = {}
    for key, spec in specs.items():
        if spec.layout == "scalar":
            composed[key] = batch[key]
            continue
        pad = fields.pad_value(spec)
        out = _widen(batch[key], spec, old, (new[0], new[1]), pad)
        for placed in placements:
            rows = slice(placed.slot * num_generations, (placed.slot + 1) * num_generations)
            out[rows] = _block(placed.group, spec, (new[0], new[1]), pad, out[rows])
        composed[key] = out
    return composed


def _widen(
    tensor: torch.Tensor, spec: FieldSpec, old: tuple[int, int], new: tuple[int, int], pad: float
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


def _block(group: Group, spec: FieldSpec, widths: tuple[int, int], pad: float, like: torch.Tensor) -> torch.Tensor:
    """The group's rows of one field as a padded block of the shape, dtype and device of `like`."""
    if spec.name not in group.keys:
        raise BatchError(f"A stored group lacks {spec.name!r}, which the batch holds; it must not be sampled.")
    stored = group.tensors.get(spec.name)
    if spec.layout == "row" and stored is not None:
        if stored.shape[1:] != like.shape[1:]:
            raise BatchError(
                f"A stored {spec.name!r} has the shape {tuple(stored.shape)} where the batch asks for {tuple(like.shape)}."
            )
        return stored.to(like)
    count = len(group.prompt_lengths) if spec.layout == "prompt" else len(group.completion_lengths)
    prompts = np.broadcast_to(group.prompt_lengths, max(count, len(group.prompt_lengths)))
    real = _real(spec, prompts[:count], group.completion_lengths[:count], widths, like.device)
    block = like.new_full((count, real.size(1)), pad)
    block[real] = stored.to(like) if stored is not None else like.new_full((), spec.implied or 0)
    return block.expand(like.size(0), -1)
