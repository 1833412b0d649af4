"""A generation batch of which everything is known that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..batch.candidates import Block, PendingGroups
from ..batch.group_view import AdvantageRule
from ..data.types import Batch, Groups
from ..distributed.row_layout import RowLayout
from ..loss.tap import TapState


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """A generation batch, of which no group will be generated again.

    Attributes:
        batch (`dict`): This process's rows as TRL returned them, texts on the CPU, with the advantages that a plugin
            gave them.
        given (`dict`): As TRL returned them, on its device.
        fetched (`dict`): The copies of these on the CPU, which `batch` has where nothing was changed.
        rows ([`RowLayout`]): Where they lie.
        groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        generations (`tuple[Groups, ...]`): The groups of all rounds of generation.
        refilled (`int`): How many of the groups are of further rounds.
        rule ([`AdvantageRule`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        recorded ([`Block`], *optional*): Log-probs that are stored without being seen by the loss (`replay_record`).
        logps_known (`bool`): Whether its log-probs are known before the loss sees its rows.
    """

    batch: Batch
    given: Batch
    fetched: Batch
    rows: RowLayout
    groups: Groups
    generations: tuple[Groups, ...]
    refilled: int
    rule: AdvantageRule
    keys: frozenset[str]
    recorded: Block | None
    logps_known: bool

    @property
    def surplus(self) -> int:
        """Number of groups of further rounds that took no slot."""
        return sum(len(groups) for groups in self.generations[1:]) - self.refilled

    def emptied(self) -> FreshBatch:
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
        fresh ([`FreshBatch`]): The batch before anything was exchanged, with all groups dead: a further iteration may
            fill each slot.
        expected ([`TapState`]): What the tap does about the composed batch.
        micro_batches (`list`, *optional*): The composed batch as the trainer buffers it, once an iteration has begun.
        step (`int`, *optional*): The trainer's count of micro-batches when an iteration last began.
    """

    fresh: FreshBatch
    expected: TapState
    micro_batches: list[Any] | None = None
    step: int | None = None
