"""Cuts groups out of TRL's batch and composes batches from groups. The only code that pads TRL's batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ..base.transfer import fetch
from ..compat import REF_LOGPS
from ..data.fields import ADVANTAGES, IMAGE_LAYOUTS, TOKEN_ADVANTAGES, TOKEN_TYPES, FieldSpec, FieldTable
from ..data.types import Batch, Group, Ints, Placement
from ..errors import BatchError
from .images import check_images, compose_images, cut_images, join_images, take_images

PROMPT_LENGTHS, COMPLETION_LENGTHS, SAME_PROMPT = "prompt lengths", "completion lengths", "same prompt"
"""Names of facts about rows beside those of fields."""


class Widths(NamedTuple):
    """The padded widths of a batch's prompts and completions."""

    prompt: int
    completion: int


def row_lengths(batch: Mapping[str, Any], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the real tokens of each row: `(prompt_lengths, completion_lengths)`, both `(B,)` int64.

    A completion whose mask is all zero (`mask_truncated_completions`) ends before its trailing pad tokens.
    """
    prompt_mask = batch["prompt_mask"].ne(0)  # (B, P)
    mask = batch["completion_mask"].ne(0)  # (B, C)
    unpadded = batch["completion_ids"].ne(pad_token_id)
    masked_out = ~mask.any(dim=1, keepdim=True)
    real = torch.where(masked_out, unpadded, mask)
    return _from_first_to_end(prompt_mask), _from_first_to_end(real.flip(1))


def _from_first_to_end(real: torch.Tensor) -> torch.Tensor:
    """`(B,)` int64: how many positions there are from the first that is set to the end of each row of `real`, `(B, T)`
    bool. Numbers of positions, 8 bytes each, would be half as large as a batch of long completions."""
    first = real.view(torch.uint8).argmax(dim=1)  # the first of equal ones; on a CPU not of bools
    return torch.where(real.any(dim=1), real.size(1) - first, 0)


def loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the tokens that the loss trains on, `(B, C)`."""
    mask: torch.Tensor = batch["completion_mask"]
    if "tool_mask" in batch:
        mask = mask * batch["tool_mask"]
    return mask


def trained_tokens(group: Group) -> torch.Tensor:
    """Return the mask of a stored group's tokens that the loss trains on, `(tokens,)`, unless their row is masked."""
    trained = torch.ones_like(group.tensors["completion_ids"], dtype=torch.bool)
    for key in ("completion_mask", "tool_mask"):
        if key in group.tensors:
            trained &= group.tensors[key].bool()
    return trained


def padding(batch: Mapping[str, Any]) -> float:
    """Return the share of pad tokens among all positions."""
    masks = (batch["prompt_mask"], batch["completion_mask"])
    real = int(torch.stack([mask.sum() for mask in masks]).sum())
    positions = sum(int(mask.numel()) for mask in masks)
    return 1.0 - real / positions


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


def cut(batch: Batch, fields: FieldTable, parts: Sequence[slice]) -> list[Group]:
    """Cut unpadded copies of some rows out of the batch, on its device, sharing no memory with it.

    Args:
        batch (`dict`): Rows of a group adjacent, as TRL returns them.
        fields ([`FieldTable`]): How to cut each key.
        parts (`Sequence[slice]`): The rows of each group, or of the part of a group that this process has.
    """
    if not parts:
        return []
    specs = check(batch, fields)
    facts = fetch(_facts_of_rows(batch, specs, fields, parts))
    prompts = facts.pop(PROMPT_LENGTHS).numpy()
    completions = facts.pop(COMPLETION_LENGTHS).numpy()
    groups = []
    for rows in parts:
        images = cut_images(batch, fields, rows)
        left_out = {name for name, of_rows in facts.items() if bool(of_rows[rows].all())}
        group = _cut_one(batch, specs, images, rows, prompts[rows], completions[rows], left_out)
        groups.append(group)
    return groups


def _facts_of_rows(
    batch: Batch, specs: Mapping[str, FieldSpec], fields: FieldTable, parts: Sequence[slice]
) -> dict[str, torch.Tensor]:
    """Return the facts about each row that cutting needs, `(B,)`, for all parts at once.

    Its prompt's and completion's lengths; by the name of a field with an implied value, whether all its values are
    that; and under `SAME_PROMPT`, whether its prompt is that of its part's first row.
    """
    prompt_lengths, completion_lengths = row_lengths(batch, fields.pad_token_id)
    facts = {PROMPT_LENGTHS: prompt_lengths, COMPLETION_LENGTHS: completion_lengths}
    first = np.arange(len(prompt_lengths))
    for rows in parts:
        first[rows] = rows.start
    firsts = torch.from_numpy(first).to(prompt_lengths.device)
    same = torch.ones_like(prompt_lengths, dtype=torch.bool)
    real = _real_positions(specs, _widths(batch), prompt_lengths, completion_lengths)
    padded = {layout: positions.logical_not_() for layout, positions in real.items()}
    for key, spec in specs.items():
        if spec.layout == "prompt":
            same &= (batch[key] == batch[key][firsts]).all(dim=1)
        if spec.implied is not None and _is_text(spec):
            fitting = batch[key] == spec.implied
            if spec.layout != "row":
                fitting |= padded[spec.layout]
            facts[key] = fitting.reshape(len(fitting), -1).all(dim=1)
    facts[SAME_PROMPT] = same
    return facts


def _real_positions(
    specs: Mapping[str, FieldSpec], widths: Widths, prompts: torch.Tensor, completions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the mask of a padded field's real positions, `(B, width)`, for each layout that a field has."""
    device = prompts.device
    left = torch.arange(widths.prompt, 0, -1, device=device) <= prompts.unsqueeze(1)
    right = torch.arange(widths.completion, device=device) < completions.unsqueeze(1)
    sides = {"prompt": [left], "completion": [right], "sequence": [left, right]}
    layouts = {spec.layout for spec in specs.values()} & sides.keys()
    return {layout: torch.cat(sides[layout], dim=1) for layout in layouts}


def _cut_one(
    batch: Batch,
    specs: dict[str, FieldSpec],
    images: dict[str, torch.Tensor],
    rows: slice,
    prompts: Ints,
    completions: Ints,
    left_out: Set[str],
) -> Group:
    """Cut the group in `rows`, with its `prompts` and `completions` lengths. All values of the fields in `left_out`
    are implied; with `SAME_PROMPT` among them, prompts are stored once."""
    keys = set(images)
    tensors = dict(images)
    widths = _widths(batch)
    kept_prompts = prompts[:1] if SAME_PROMPT in left_out else prompts
    for key, spec in specs.items():
        if not _is_text(spec):
            continue
        if key in TOKEN_TYPES and not images:
            continue  # a row without images, in a batch that has some: all zeros
        keys.add(key)
        if key == ADVANTAGES and spec.layout != "row":
            keys.add(TOKEN_ADVANTAGES)
        if key in left_out:
            continue
        block = batch[key][rows].detach()
        if spec.layout == "prompt":
            block = block[: len(kept_prompts)]
        dtype = getattr(torch, spec.dtype) if spec.dtype else block.dtype
        tensors[key] = _without_padding(block, spec, prompts, completions, widths, dtype)
    return Group(tensors, frozenset(keys), kept_prompts.copy(), completions.copy())


def _is_text(spec: FieldSpec) -> bool:
    """Return whether the field is a row tensor of tokens or values: neither of images nor the same for all rows."""
    return spec.layout != "scalar" and spec.layout not in IMAGE_LAYOUTS


def _without_padding(
    block: torch.Tensor, spec: FieldSpec, prompts: Ints, completions: Ints, widths: Widths, dtype: torch.dtype
) -> torch.Tensor:
    """Copy the real values of the rows of `block`, flat; for the layout `"row"` the block itself."""
    if spec.layout == "row":
        return block.to(dtype, copy=True).contiguous()
    block = block.to(dtype)  # at once: each operation is a launch on a GPU
    pieces = []
    for row, (prompt, completion) in enumerate(zip(prompts.tolist(), completions.tolist(), strict=True)):
        if row < len(block):
            pieces.append(block[row, _span(spec, prompt, completion, widths)])
    return torch.cat(pieces)


def _span(spec: FieldSpec, prompt: int, completion: int, widths: Widths) -> slice:
    """Return the row's real positions: prompts are right-aligned, completions left-aligned."""
    if spec.layout == "completion":
        return slice(0, completion)
    if spec.layout == "prompt":
        return slice(widths.prompt - prompt, widths.prompt)
    return slice(widths.prompt - prompt, widths.prompt + completion)


def join(parts: Sequence[Group], fields: FieldTable) -> Group:
    """Join the rows of all `parts`, in order, into one group."""
    if len(parts) == 1:
        return parts[0]
    parts = _on_one_device(parts)
    first = parts[0]
    shared = all(_same_prompt(part, first, fields) for part in parts)
    tensors: dict[str, torch.Tensor] = {}
    for key in _text_keys(parts, fields):
        spec = fields.spec_in(first.keys, key)
        if spec.layout == "prompt" and shared:
            tensors[key] = first.tensors[key]
            continue
        like = next(part.tensors[key] for part in parts if key in part.tensors)
        tensors[key] = torch.cat([_flat(part, spec, like) for part in parts])
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
        if spec.layout == "row":
            tensors[key] = tensor[torch.from_numpy(index).to(tensor.device)]
        elif spec.layout == "prompt" and shared:
            tensors[key] = tensor
        else:
            parts = torch.split(tensor, _value_counts(group, spec).tolist())
            tensors[key] = torch.cat([parts[row] for row in rows])
    images = take_images(group, rows, fields)
    return Group(
        tensors | images,
        group.keys,
        group.prompt_lengths if shared else group.prompt_lengths[index],
        group.completion_lengths[index],
    )


def _on_one_device(parts: Sequence[Group]) -> Sequence[Group]:
    """Return the parts, moved to the CPU if some came from other processes."""
    devices = {tensor.device for part in parts for tensor in part.tensors.values()}
    if len(devices) <= 1:
        return parts
    return [part.map(torch.Tensor.cpu) for part in parts]


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


def _flat(part: Group, spec: FieldSpec, like: torch.Tensor) -> torch.Tensor:
    """Return one field's values of all rows of `part`; implied ones get the dtype of `like`."""
    tensor = part.tensors.get(spec.name)
    if tensor is None and spec.layout == "row":
        return like.new_full((len(part.completion_lengths), *like.shape[1:]), spec.implied or 0)
    if tensor is None:
        count = int(_value_counts(part, spec).sum())
        return like.new_full((count,), spec.implied or 0)
    if spec.layout == "prompt" and _has_one_prompt(part):
        return tensor.repeat(len(part.completion_lengths))
    return tensor


def _value_counts(part: Group, spec: FieldSpec) -> Ints:
    """Return the number of values of a padded field in each row."""
    if spec.layout == "prompt":
        return _prompt_lengths(part)
    if spec.layout == "sequence":
        return _prompt_lengths(part) + part.completion_lengths
    return part.completion_lengths


def _prompt_lengths(group: Group) -> Ints:
    """Return the prompt length of each row, `(G,)`, also if all rows share one prompt."""
    return np.broadcast_to(group.prompt_lengths, len(group.completion_lengths))


def compose(
    batch: Batch, fields: FieldTable, placements: Sequence[Placement], multiple_of: int | None = None
) -> Batch:
    """Return the batch with each placed group in its slot, widened if a stored row needs it. Nothing is truncated.

    The batch's tensors are left as they are: what changes is a new tensor. Without placements, the batch itself
    returns.

    A field of all placements is written at once: each operation is a launch on a GPU.

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
    old = _widths(batch)
    new = _wider(old, placements, multiple_of)
    by_rows = sorted(placements, key=lambda placed: placed.start)
    placed, prompts, completions = _placed_lengths(by_rows, batch["prompt_ids"])
    real = _real_positions(specs, new, prompts, completions)
    composed = dict(batch)
    for key, spec in specs.items():
        if not _is_text(spec):
            continue
        _refuse_missing(by_rows, spec)
        pad = fields.pad_value(spec)
        out = _widen(batch[key], spec, old, new, pad)
        if spec.layout == "row":
            _replace_rows(out, by_rows, spec)
        else:
            values = _joined_values(by_rows, spec, out)
            out.masked_fill_(placed, pad).masked_scatter_(real[spec.layout], values)
        composed[key] = out
    return composed | compose_images(batch, fields, placements)


def _refuse_missing(placements: Sequence[Placement], spec: FieldSpec) -> None:
    for placed in placements:
        group = placed.group
        known = spec.name in group.keys or spec.name in TOKEN_TYPES
        if not known or (spec.implied is None and spec.name not in group.tensors):
            raise BatchError(f"A stored group lacks {spec.name!r}, which the batch holds; it must not be sampled.")


def _placed_lengths(placements: Sequence[Placement], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, where `like`, `(B, P)`, is, which rows are placed, `(B, 1)` bool, and their prompts' and completions'
    lengths, `(B,)` int64, 0 in all other rows."""
    numbers = np.zeros((3, len(like)), np.int64)
    for placed in placements:
        numbers[0, placed.rows] = 1
        numbers[1, placed.rows] = _prompt_lengths(placed.group)[placed.part]
        numbers[2, placed.rows] = placed.group.completion_lengths[placed.part]
    rows, prompts, completions = torch.from_numpy(numbers).to(like.device).unbind()
    return rows.bool().unsqueeze(1), prompts, completions


def with_stored_fields(batch: Batch, fields: FieldTable, placements: Sequence[Placement]) -> Batch:
    """Return the batch with token-level fields that only placed groups have, such as the tool mask of a file; its own
    rows get the implied value."""
    added: Batch = {}
    for placed in placements:
        for key, stored in placed.group.tensors.items():
            spec = fields.spec(key)
            if batch.get(key) is None and spec.layout == "completion" and spec.implied is not None:
                added[key] = implied_values(batch, spec, stored.dtype)
    return batch | added if added else batch


def implied_values(batch: Batch, spec: FieldSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return a text field of the batch filled with the implied value."""
    shape = _expected_shape(spec, batch["prompt_ids"].size(0), _widths(batch))
    assert spec.implied is not None
    return torch.full(shape, spec.implied, dtype=dtype, device=batch["prompt_ids"].device)


def _wider(old: Widths, placements: Sequence[Placement], multiple_of: int | None) -> Widths:
    """Return the widths that hold the batch and all placed rows."""
    longest_prompt = 0
    longest_completion = 0
    for placed in placements:
        prompts = placed.group.prompt_lengths
        completions = placed.group.completion_lengths[placed.part]
        longest_prompt = max(longest_prompt, int(prompts.max()))
        longest_completion = max(longest_completion, int(completions.max()))
    return Widths(
        _rounded_up(old.prompt, longest_prompt, multiple_of),
        _rounded_up(old.completion, longest_completion, multiple_of),
    )


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
        return tensor.clone()
    return functional.pad(tensor, (left, right), value=pad)


def _replace_rows(out: torch.Tensor, placements: Sequence[Placement], spec: FieldSpec) -> None:
    """Write one field of the placements, with one value per row, into their rows of `out`."""
    for placed in placements:
        if spec.name == ADVANTAGES and TOKEN_ADVANTAGES in placed.group.keys:
            raise BatchError(
                "A stored group has per-token advantages, but the batch has one per row: all batches of a run must "
                "have the same kind, also after resuming. Start with an empty buffer."
            )
        stored = placed.group.tensors.get(spec.name)
        out[placed.rows] = spec.implied or 0 if stored is None else _row_block(stored, spec, out)[placed.part]


def _joined_values(placements: Sequence[Placement], spec: FieldSpec, like: torch.Tensor) -> torch.Tensor:
    """Return one padded field's real values of all placements, flat, with the dtype and device of `like`."""
    values = [_values(placed, spec).to(like.dtype) for placed in placements]
    if len({value.device for value in values}) > 1:
        values = [value.to(like.device) for value in values]
    joined = values[0] if len(values) == 1 else torch.cat(values)
    return joined.to(like.device)


def _values(placed: Placement, spec: FieldSpec) -> torch.Tensor:
    """Return one padded field's real values of the placed rows, flat."""
    counts = _value_counts(placed.group, spec)
    stored = placed.group.tensors.get(spec.name)
    if stored is None:
        return torch.full((int(counts[placed.part].sum()),), spec.implied or 0)
    if spec.name == ADVANTAGES and TOKEN_ADVANTAGES not in placed.group.keys:
        of_tokens = torch.from_numpy(counts[placed.part]).to(stored.device)
        return stored.view(len(counts))[placed.part].repeat_interleave(of_tokens)  # of a file: one a row
    if spec.layout == "prompt" and _has_one_prompt(placed.group):
        return stored.repeat(placed.count)
    ends = [0, *np.cumsum(counts).tolist()]
    return stored[ends[placed.part.start] : ends[placed.part.stop]]


def _row_block(stored: torch.Tensor, spec: FieldSpec, like: torch.Tensor) -> torch.Tensor:
    """Return a field with one value per row, with the dtype and device of `like`."""
    if stored.numel() == len(stored) and like.numel() == len(like):
        stored = stored.view(-1, *like.shape[1:])  # (G,) of a file where the batch has (B, 1)
    if stored.shape[1:] != like.shape[1:]:
        raise BatchError(
            f"A stored {spec.name!r} has the shape {tuple(stored.shape)} where the batch has {tuple(like.shape)}."
        )
    return stored.to(like)


def split_reference(batch: Batch, kl: str) -> tuple[Batch, torch.Tensor | None]:
    """Split off the reference log-probs: only fresh rows have them unless all KL terms count."""
    if kl == "all" or REF_LOGPS not in batch:
        return batch, None
    rest = dict(batch)
    return rest, rest.pop(REF_LOGPS)


def with_reference(batch: Batch, reference: torch.Tensor | None) -> Batch:
    """Return the batch with its fresh rows' reference log-probs, `(B, C)`, padded to the new width."""
    if reference is None:
        return batch
    wider = batch["completion_ids"].size(1) - reference.size(1)
    return {**batch, REF_LOGPS: functional.pad(reference, (0, wider))}
