"""From what was decided to the batch that is trained on: the rows exchanged, tokens counted, dead groups masked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import compat
from ..buffer.candidates import Candidate, PendingGroups, StepCarry, collect_candidates
from ..components import Components
from ..distributed.row_layout import RowLayout
from ..loss.dead_group_mask import NOTHING_MASKED, DeadGroupMask
from ..plan import Plan
from ..types import Batch, Context, Group, Groups, Placement
from .dead_groups import dead_slots, place_copies


def compose_batch(
    batch: Batch,
    rows: RowLayout,
    plan: Plan,
    groups: Mapping[int, Group],
    components: Components,
    context: Context,
) -> tuple[Batch, list[Placement]]:
    """The batch with the drawn groups in their slots; without any, the batch itself.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`RowLayout`]): Where its rows lie.
        plan ([`Plan`]): What was decided.
        groups (`Mapping[int, Group]`): Payload of what was drawn, by serial.
        components ([`Components`]): The hooks, which may compose in their own way.
        context ([`Context`]): Handed to hooks.

    Returns:
        The batch, and the placements of drawn groups (not those of copies).
    """
    replayed = rows.placements(plan.sampled, groups)
    copied = place_copies(batch, rows, plan.copies, components.fields)
    placements = replayed + copied
    if not placements:
        return batch, replayed
    return components.hooks.compose(batch, placements, context), replayed


def count_items(batch: Batch, composed: Batch, total: Mapping[str, float]) -> Batch:
    """The composed batch with its token count corrected by what all ranks exchanged and excluded."""
    delta = total["items_delta"]
    if total["excluded"] < total["groups"]:  # a batch without any live group keeps its count: nothing is trained
        delta -= total["excluded_items"]
    if not delta:
        return composed
    items = batch["num_items_in_batch"]
    change = torch.as_tensor(delta, dtype=items.dtype, device=items.device)
    return {**composed, "num_items_in_batch": items + change}


def mask_dead_groups(
    plan: Plan,
    fresh: Groups,
    rows: RowLayout,
    total: Mapping[str, float],
    unfilled: str,
    denominator: str,
) -> DeadGroupMask:
    """What the loss does about dead groups that nothing filled.

    Args:
        plan ([`Plan`]): What is filled.
        fresh ([`Groups`]): The fresh groups.
        rows ([`RowLayout`]): Where their rows lie.
        total (`Mapping[str, float]`): Counters of all ranks.
        unfilled (`str`): `replay_unfilled`.
        denominator (`str`): What this trainer's loss divides by.
    """
    if unfilled not in ("mask", "exclude"):
        return NOTHING_MASKED
    masked = []
    for slot in dead_slots(fresh, plan.sampled.slots):
        local, _ = rows.local(slot)
        if local.stop:
            masked.append(local)
    if unfilled == "mask" or total["excluded"] == total["groups"]:
        return DeadGroupMask(masked)
    factor = total["groups"] / (total["groups"] - total["excluded"])
    return DeadGroupMask(masked, factor, denominator)


def collect(
    batch: Batch,
    plan: Plan,
    fresh: Groups,
    rows: RowLayout,
    components: Components,
    carry: StepCarry,
    update: int,
) -> list[Candidate]:
    """Live groups become candidates, which `carry` keeps; returns those whose rows here still need log-probs."""
    fields = components.fields
    stored = fields.stored_keys(batch) | {compat.OLD_LOGPS}
    local = [(slot, *rows.local(slot)) for slot in plan.candidates]
    keys = [rows.holds(stored, slot) for slot in plan.candidates]
    candidates = collect_candidates(batch, fields, fresh, local, keys, carry.serial, update)
    carry.serial += len(candidates)
    carry.pending_groups = PendingGroups(fresh, candidates)
    carry.collected_at = update
    if compat.OLD_LOGPS in batch:
        return []
    return [candidate for candidate in candidates if candidate.group is not None]
