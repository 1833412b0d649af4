"""From what was decided to the batch that is trained on: the rows exchanged, tokens counted, rows masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from .. import compat
from ..batch.compose import compose, cut, with_stored_fields
from ..buffer.candidates import Candidate, logps_dtype, with_rewards
from ..components import Components
from ..decision import RowOutcome, Taken
from ..errors import ConfigurationError
from ..loss.row_mask import NOTHING_MASKED, RowMask
from ..types import Batch, Bools, Floats, Group, Placement
from .dead_groups import all_wrong, dead_slots, place_copies
from .stages import BatchDecision, FreshBatch


def write_advantages(batch: Batch, fresh: FreshBatch) -> Batch:
    """The batch with what a plugin made of the advantages of this process's rows; values that it left keep their
    bits, and without any other the batch itself returns.

    Args:
        batch (`dict`): As TRL returned it.
        fresh ([`FreshBatch`]): Its groups as the plugin shaped them, and the columns of the trainer's own.
    """
    rows = fresh.rows
    shaped = rows.of_here(fresh.groups.advantages)
    stock = rows.columns["advantages"][rows.here]
    changed = shaped != stock
    if fresh.rule.of_tokens and shaped[changed].any():
        raise ConfigurationError(
            "A plugin's trl_replay_advantages gave a row another advantage, and this trainer gives one to each of its "
            "tokens: there a plugin can only mask rows (NaN) or give them 0. Leave the plugin out."
        )
    return _with_advantages(batch, shaped, changed)


def _with_advantages(batch: Batch, values: Floats, changed: Bools) -> Batch:
    """The batch with some of its advantages changed; `values` and `changed` are `(B,)`."""
    if not changed.any():
        return batch
    advantages = batch["advantages"]
    shape = (-1, *[1] * (advantages.dim() - 1))
    where = torch.from_numpy(changed).to(advantages.device).view(shape)
    written = torch.tensor(values).to(advantages).view(shape)  # a copy: the view of the groups can only be read
    return {**batch, "advantages": torch.where(where, written, advantages)}


def compose_batch(
    batch: Batch, decision: BatchDecision, payload: Mapping[int, Group], components: Components
) -> tuple[Batch, list[Placement]]:
    """The batch with the drawn rows in their slots; without any, the batch itself.

    Args:
        batch (`dict`): With the advantages of `decision.fresh`.
        decision ([`BatchDecision`]): What was decided.
        payload (`Mapping[int, Group]`): What was drawn, by serial.
        components ([`Components`]): How to pad.

    Returns:
        The batch, and the placements of drawn groups (not those of copies).
    """
    rows = decision.fresh.rows
    outcome = decision.outcome
    # before anything is placed: of a slot that straddles processes, stored rows may take another one's rows alone
    batch = _with_advantages(batch, rows.of_here(outcome.advantages), rows.of_here(outcome.computed))
    groups = {
        taken.serial: _rewritten(payload[taken.serial], taken, outcome)
        for taken in decision.sampled.taken
        if taken.serial in payload
    }
    replayed = rows.placements(decision.sampled, groups)
    copied = place_copies(batch, rows, decision.copies, components.fields)
    placements = replayed + copied
    if not placements:
        return batch, replayed
    batch = with_stored_fields(batch, components.fields, placements)
    return compose(batch, components.fields, placements, components.pad_to_multiple_of), replayed


def _rewritten(group: Group, taken: Taken, outcome: RowOutcome) -> Group:
    """Stored rows with the advantages that were computed for them in their slot, if any were."""
    if not group.keys or not outcome.computed[taken.slot, taken.targets].any():
        return group
    values = torch.from_numpy(outcome.advantages[taken.slot, taken.targets])
    stored = group.tensors["advantages"]
    return replace(group, tensors={**group.tensors, "advantages": values.to(stored).view(stored.shape)})


def rows_without_kl(kl: str, fresh: FreshBatch, placements: Sequence[Placement], pass_reward: float) -> list[int]:
    """Rows of this process whose KL term does not count.

    Args:
        kl (`str`): `replay_kl`.
        fresh ([`FreshBatch`]): The batch.
        placements (`Sequence[Placement]`): What was exchanged here.
        pass_reward (`float`): `replay_pass_reward`.
    """
    if kl == "all":
        return []
    groups = fresh.groups
    counts = np.ones(len(groups), bool) if kl == "fresh" else all_wrong(groups, pass_reward)
    here = np.repeat(counts, fresh.rows.size)[fresh.rows.here]
    for placed in placements:
        here[placed.rows] = False
    return np.flatnonzero(~here).tolist()


def count_items(batch: Batch, composed: Batch, total: Mapping[str, float]) -> Batch:
    """The composed batch with its token count corrected by what all ranks exchanged and left out."""
    delta = total["items_delta"]
    if total["excluded"] < total["groups"]:  # a batch without any live group keeps its count: nothing is trained
        delta -= total["excluded_items"]
    if not delta:
        return composed
    items = batch["num_items_in_batch"]
    change = torch.as_tensor(delta, dtype=items.dtype, device=items.device)
    counted = items + change
    return {**composed, "num_items_in_batch": torch.where(counted > 0, counted, items)}


def mask_rows(decision: BatchDecision, total: Mapping[str, float], unfilled: str, denominator: str) -> RowMask:
    """Returns what the loss does about rows that a plugin masks, and about dead groups that nothing filled.

    Args:
        decision ([`BatchDecision`]): What is filled, and which rows are masked.
        total (`Mapping[str, float]`): Counters of all ranks.
        unfilled (`str`): `replay_unfilled`.
        denominator (`str`): What this trainer's loss divides by.
    """
    rows = decision.fresh.rows
    left_out = decision.outcome.masked.copy()
    silent = left_out.copy()
    excluding = unfilled == "exclude" and total["excluded"] < total["groups"]
    if unfilled in ("mask", "exclude"):
        dead = dead_slots(decision.fresh.groups, decision.sampled.slots)
        silent[dead] = True
        if excluding:
            left_out[dead] = True
    count = total["groups"] * rows.size
    out = (total["excluded"] * rows.size if excluding else 0) + total["masked_apart"]
    factor = count / (count - out) if 0 < out < count else 1.0
    if not silent.any() and factor == 1.0:
        return NOTHING_MASKED
    masked = np.flatnonzero(rows.of_here(silent)).tolist()
    excluded = np.flatnonzero(rows.of_here(left_out)).tolist()
    return RowMask(masked, excluded, factor, denominator if out else "")


def collect(
    batch: Batch,
    decision: BatchDecision,
    components: Components,
    serial: int,
    update: int,
    recorded: torch.Tensor | None = None,
) -> list[Candidate]:
    """The live groups that are to be stored, as candidates: complete where their log-probs are known.

    Args:
        batch (`dict`): The fresh one, with the advantages of `decision.fresh`.
        decision ([`BatchDecision`]): Which groups.
        components ([`Components`]): How to cut each key.
        serial (`int`): The first one's serial number.
        update (`int`): Updates done.
        recorded (`(B, C)`, *optional*): Log-probs of the batch that it does not hold itself.
    """
    if recorded is not None:
        batch = {**batch, compat.OLD_LOGPS: recorded}
    fields = components.fields
    fresh = decision.fresh
    stored = fields.stored_keys(batch) | {compat.OLD_LOGPS}
    local = {slot: fresh.rows.local(slot) for slot in decision.candidates}
    groups = iter(cut(batch, fields, [rows for rows, _ in local.values() if rows.stop]))
    candidates = []
    for number, (slot, (rows, first)) in enumerate(local.items(), serial):
        candidate = Candidate(
            serial=number,
            slot=slot,
            group=with_rewards(next(groups), fresh.groups.rewards[slot, first:]) if rows.stop else None,
            keys=fresh.rows.holds(stored, slot),
            rows=rows,
            update=update,
            logps_dtype=logps_dtype(fields),
        )
        candidates.append(candidate)
    if compat.OLD_LOGPS in batch:
        for candidate in candidates:
            candidate.complete()
    return candidates
