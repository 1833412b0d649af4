"""The stages of a step: a batch that is generated, one whose slots are filled, and all that is decided about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..batch.group_view import AdvantageRule
from ..decision import Decision, RowOutcome, Sampled
from ..distributed.row_layout import RowLayout
from ..types import Groups
from .dead_groups import Pair


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """A generation batch, of which no group will be generated again.

    Attributes:
        rows ([`RowLayout`]): Where its rows lie.
        groups ([`Groups`]): Its groups, with what a plugin made of their advantages.
        rule ([`AdvantageRule`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        known (`bool`): Whether its log-probs are known before the loss sees its rows.
    """

    rows: RowLayout
    groups: Groups
    rule: AdvantageRule
    keys: frozenset[str]
    known: bool

    def emptied(self) -> FreshBatch:
        """The batch with every slot to be filled."""
        dead = np.ones(len(self.groups), bool)
        return replace(self, groups=replace(self.groups, dead=dead))


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots that replay may fill.

    Attributes:
        order (`list[int]`): Slots, the most replaceable first.
        most (`int`): How many of them.
    """

    order: list[int]
    most: int

    @property
    def wanted(self) -> int:
        """Number of slots that are filled if there is enough to fill them with."""
        return min(len(self.order), self.most)


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch whose slots are filled.

    Attributes:
        sampled ([`Sampled`]): What stored rows take.
        outcome ([`RowOutcome`]): What all rows train with.
    """

    sampled: Sampled
    outcome: RowOutcome

    @classmethod
    def with_nothing(cls, fresh: Groups) -> Filled:
        """All slots stay as they are."""
        return cls(Sampled(), RowOutcome.of_fresh(fresh))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision(Decision):
    """All that is decided about a batch that is to be trained on.

    Attributes:
        fresh ([`FreshBatch`]): The batch.
        outcome ([`RowOutcome`]): What its rows train with.
        copies (`list[Pair]`): Dead slots, and the live slots that are copied there.
        candidates (`list[int]`): Slots of the live groups that are to be stored once their log-probs are known.
    """

    fresh: FreshBatch
    outcome: RowOutcome
    copies: list[Pair]
    candidates: list[int]

    def numbers(self) -> list[object]:
        """Advantages are not among them: they may differ in their last bits between machines."""
        masked = np.flatnonzero(self.outcome.masked)
        computed = np.flatnonzero(self.outcome.computed)
        return [*Decision.numbers(self), masked, computed]
