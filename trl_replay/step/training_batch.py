"""From what was decided to the batch that is trained on: the rows exchanged, tokens counted, rows masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from .. import compat
from ..base.progress import begin, send
from ..batch.compose import compose, cut, with_stored_fields
from ..batch.groups import AdvantageFormula, Block, Candidate, PendingGroups, Recorded, fill_missing, with_rewards
from ..data.plan import FRESH, Plan
from ..data.types import PIXELS, Batch, Bools, FieldTable, Floats, Group, Groups, Ints, Placement
from ..distributed.communicator import Decision, SharedRows
from ..errors import ConfigurationError, SeamError
from ..loss.supply import COMPOSED, EXCLUDED, ROWS, SILENT, WITHOUT_KL
from ..loss.tap import TapState
from ..setup.settings import Components


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A generation batch, of which no group will be generated again.

    Attributes:
        batch (`dict`): This process's rows as TRL returned them, texts on the CPU, with the advantages that a plugin
            gave them.
        given (`dict`): As TRL returned them, on its device.
        on_cpu (`dict`): The copies of these on the CPU, which `batch` has where nothing was changed.
        rows ([`SharedRows`]): Where they lie.
        groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        generations (`tuple[Groups, ...]`): The groups of all rounds of generation.
        refilled (`int`): How many of the groups are of further rounds.
        formula ([`AdvantageFormula`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        recorded ([`Block`], *optional*): Log-probs that are stored without being seen by the loss (`replay_record`).
        logps_known (`bool`): Whether its log-probs are known before the loss sees its rows.
    """

    batch: Batch
    given: Batch
    on_cpu: Batch
    rows: SharedRows
    groups: Groups
    generations: tuple[Groups, ...]
    refilled: int
    formula: AdvantageFormula
    keys: frozenset[str]
    recorded: Block | None
    logps_known: bool

    @property
    def surplus(self) -> int:
        """Number of groups of further rounds that took no slot."""
        return sum(len(groups) for groups in self.generations[1:]) - self.refilled

    def emptied(self) -> ScoredBatch:
        """The batch with every slot to be filled."""
        dead = np.ones(len(self.groups), bool)
        return replace(self, groups=replace(self.groups, dead=dead))


SAVED = ("collected_at", "unfinished", "settled")
"""Attributes of [`StepCarry`] that a checkpoint keeps."""


@dataclass(slots=True)
class StepCarry:
    """State that a session carries from one generation batch to the next.

    Attributes:
        pending ([`PendingGroups`], *optional*): The last batch's candidates; None if they have settled.
        collected_at (`int`, *optional*): Update at which candidates were last collected.
        unfinished (`bool`): Whether a batch was scored since training last ended.
        settled (`dict[str, float]`): What further iterations have counted since the batch was generated, on all
            processes: the next batch's metrics tell it.
    """

    pending: PendingGroups | None = None
    collected_at: int | None = None
    unfinished: bool = False
    settled: dict[str, float] = field(default_factory=dict)

    def pop_candidates(self) -> PendingGroups | None:
        """Return the candidates, for the batch that settles them, and forget them here."""
        pending, self.pending = self.pending, None
        return pending

    def collected(self, pending: PendingGroups, update: int) -> None:
        """Keep a batch's candidates until the next batch settles them, with the number of updates done."""
        self.pending = pending
        self.collected_at = update

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, candidates apart."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, without candidates."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.pending = None


@dataclass(slots=True)
class IterationTemplate:
    """One generation batch, kept until the next one.

    Attributes:
        scored ([`ScoredBatch`]): The batch before anything was exchanged, with all groups dead: a further iteration
            may fill each slot.
        expected ([`TapState`]): What the tap does about the composed batch.
        micro_batches (`list`, *optional*): The composed batch as the trainer buffers it, once an iteration has begun.
        step (`int`, *optional*): The trainer's count of micro-batches when an iteration last began.
    """

    scored: ScoredBatch
    expected: TapState
    micro_batches: list[Any] | None = None
    step: int | None = None


def write_advantages(batch: Batch, rows: SharedRows, groups: Groups, of_tokens: bool) -> Batch:
    """The batch with what a plugin made of the advantages of this process's rows; values that it left keep their
    bits, and without any other the batch itself returns.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`SharedRows`]): With the columns of the trainer's own.
        groups ([`Groups`]): As the plugin shaped them.
        of_tokens (`bool`): Whether each token has its own advantage.
    """
    shaped = rows.of_here(groups.advantages)
    changed = shaped != rows.columns["advantages"][rows.here]
    if of_tokens and shaped[changed].any():
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
    where = torch.from_numpy(changed).view(shape)
    written = torch.tensor(values).to(advantages).view(shape)  # a copy: the view of the groups can only be read
    return {**batch, "advantages": torch.where(where, written, advantages)}


def compose_batch(
    scored: ScoredBatch, decision: Decision, payload: Mapping[int, Group], components: Components
) -> tuple[Batch, list[Placement]]:
    """The batch that the plan describes; the fresh one itself where every row trains on itself.

    Args:
        scored ([`ScoredBatch`]): The batch.
        decision ([`Decision`]): With the plan.
        payload (`Mapping[int, Group]`): What was drawn, by serial.
        components ([`Components`]): How to pad.

    Returns:
        The batch, and the placements of stored rows.
    """
    rows, plan, fields, buffer = scored.rows, decision.plan, components.fields, components.buffer
    replayed = rows.placements(decision, buffer.table, buffer.clock.update, payload)
    batch, placements = with_stored_fields(scored.batch, fields, replayed)
    composed = compose(batch, fields, placements, components.loss.pad_to_multiple_of)
    own = plan.column(buffer.table.row_advantage, scored.groups.advantages)
    changed = rows.of_here(plan.advantages != own)
    return _with_advantages(composed, rows.of_here(plan.advantages), changed), replayed


def row_flags(rows: SharedRows, plan: Plan, leaves_out: bool) -> Ints:
    """The second column of the batch key `ROWS`, `(B,)` int64.

    Args:
        rows ([`SharedRows`]): Where rows lie.
        plan ([`Plan`]): What they train on.
        leaves_out (`bool`): Whether masked rows are out of denominators.
    """
    flags = np.where(plan.masked | plan.silent, SILENT, 0)
    flags |= np.where(plan.masked & leaves_out, EXCLUDED, 0)
    flags |= np.where(plan.kl, 0, WITHOUT_KL)
    here = rows.of_here(flags)
    here |= COMPOSED * int((rows.of_here(plan.entry) != FRESH).any())
    return here


def row_factor(total: Mapping[str, float], size: int) -> float:
    """Rows of all processes over those that are not masked; 1 where none is left, and denominators stay."""
    rows = total["groups"] * size
    left = rows - total["excluded"] * size - total["masked"]
    return rows / left if left else 1.0


def count_items(batch: Batch, total: Mapping[str, float], size: int, told: int | None) -> Batch:
    """The composed batch with its token count corrected by what all ranks exchanged and left out.

    Args:
        batch (`dict`): Composed.
        total (`Mapping[str, float]`): Counters of all ranks.
        size (`int`): Rows of a group.
        told (`int`, *optional*): The token count of the batch as it was scored, where the loss divides by it.

    Raises:
        SeamError: It counts something else than the tokens that train.
    """
    masked = total["excluded"] * size + total["masked"]
    if not total["items_delta"] or masked == total["groups"] * size:
        return batch
    if told is not None and told != total["items"] and not total["refilled"]:
        raise SeamError(
            f"num_items_in_batch of the scored batch is {told}, and its rows have {total['items']:.0f} tokens that "
            "train: replay can't tell what it would be with other rows. Leave the count as TRL made it and change the "
            "loss instead, or train without replay: use_replay=False."
        )
    items = batch["num_items_in_batch"]
    change = torch.as_tensor(total["items_delta"], dtype=items.dtype, device=items.device)
    counted = items + change
    return {**batch, "num_items_in_batch": torch.where(counted > 0, counted, items)}


def collect(scored: ScoredBatch, slots: Sequence[int], components: Components) -> list[Candidate]:
    """The live groups that are to be stored, as candidates: complete where their log-probs are known.

    Args:
        scored ([`ScoredBatch`]): The batch.
        slots (`Sequence[int]`): Which groups.
        components ([`Components`]): How to cut each key, and the buffer, which numbers them.
    """
    batch, fields, buffer = scored.batch, components.fields, components.buffer
    stored = fields.stored_keys(batch) | {compat.OLD_LOGPS}
    local = {slot: scored.rows.local(slot) for slot in slots}
    groups = iter(cut(batch, fields, [rows for rows, _ in local.values() if rows.stop]))
    candidates = []
    numbers = buffer.take_serials(len(slots))
    for number, (slot, (rows, first)) in zip(numbers, local.items(), strict=True):
        candidate = Candidate(
            serial=number,
            slot=slot,
            group=with_rewards(next(groups), scored.groups.rewards[slot, first:]) if rows.stop else None,
            keys=scored.rows.holds(stored, slot),
            rows=rows,
            update=buffer.clock.update,
        )
        candidates.append(candidate)
        if candidate.group is None:
            continue
        if scored.recorded is not None:
            candidate.records = [Recorded(scored.recorded, row) for row in range(rows.start, rows.stop)]
        elif not candidate.waits:
            fill_missing(candidate.group.tensors)
        if PIXELS in candidate.group.tensors:
            tensors = candidate.group.tensors.items()
            candidate.images = begin({key: tensor for key, tensor in tensors if fields.is_image(key)})
    return candidates


def send_batch(
    batch: Batch,
    given: Batch,
    on_cpu: Batch,
    fields: FieldTable,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """A composed batch on the trainer's device: tensors that are still those of the fresh batch are the trainer's own,
    and all others go up in one copy.

    Args:
        batch (`dict`): Its texts on the CPU.
        given, on_cpu (`dict`): The fresh batch on the trainer's device and on the CPU.
        fields ([`FieldTable`]): The batch keys that are known.
        others (`Mapping[str, torch.Tensor]`): What goes up with it.

    Returns:
        The batch, and `others`.
    """
    sent: Batch = {
        key: given[key] if key in on_cpu and value is on_cpu[key] else value for key, value in batch.items()
    }
    device = given["prompt_ids"].device
    away = {
        key: value
        for key, value in sent.items()
        if torch.is_tensor(value) and value.device != device and key != ROWS and not fields.is_image(key)
    }
    moved = send({**away, **{("", name): value for name, value in others.items()}}, device)
    return {**sent, **{key: moved[key] for key in away}}, {name: moved["", name] for name in others}
