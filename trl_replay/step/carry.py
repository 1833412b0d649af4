"""What a session carries from one generation batch to the next, and the batch on which further iterations are composed
(`replay_iterations="replay"`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..batch.candidates import PendingGroups
from ..loss.tap import Expected
from .fresh_batch import FreshBatch

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

    def take(self) -> PendingGroups | None:
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
        expected ([`Expected`]): What the tap does about the composed batch.
        micro_batches (`list`, *optional*): The composed batch as the trainer buffers it, once an iteration has begun.
        step (`int`, *optional*): The trainer's count of micro-batches when an iteration last began.
    """

    fresh: FreshBatch
    expected: Expected
    micro_batches: list[Any] | None = None
    step: int | None = None
