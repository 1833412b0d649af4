"""The components of a session, built before anything is patched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..base.progress import KeptErrors
from ..batch.layout import Layout
from ..buffer import ReplayBuffer
from ..data.fields import FieldTable
from ..data.success import Success
from ..data.tasks import Tasks
from ..data.types import Corrected, ReplayedRows
from ..hooks import CheckedHooks
from ..loss.bounds import Bounds
from ..loss.gates import Gates
from ..protocols import Scope
from .settings import Settings


@dataclass(frozen=True, slots=True)
class OfLoss:
    """What the trainer's loss asks for, of a trainer that composes batches.

    Attributes:
        gates ([`Gates`]): What replayed rows must pass there.
        bounds ([`Bounds`]): What no replayed row can pass.
        token_weights (`bool`): Whether a correction may give one weight a token.
        pad_to_multiple_of (`int`, *optional*): The trainer's, of a composed batch's widths.
    """

    gates: Gates = field(default_factory=Gates)
    bounds: Bounds = field(default_factory=Bounds)
    token_weights: bool = True
    pad_to_multiple_of: int | None = None


@dataclass(slots=True)
class Components:
    """The components of one session.

    Attributes:
        settings ([`Settings`]): What the session goes by.
        buffer ([`ReplayBuffer`]): Where groups are kept.
        scope ([`Scope`]): Who shares the buffer.
        hooks ([`CheckedHooks`]): Plugins and strategies.
        fields ([`FieldTable`]): The batch keys that are known.
        tasks ([`Tasks`]): What rows are generated for.
        num_generations (`int`): Rows of a group.
        loss ([`OfLoss`]): What its loss asks for.
        mixes_rows (`bool`): Whether the configured mixer may put stored rows beside fresh ones in a group.
        forwards_to_record (`bool`): Whether every fresh batch gets a no-grad forward for its log-probs, which are
            stored and never trained on.
        processes (`int`): Number of processes.
        success ([`Success`]): What passes.
        layout ([`Layout`]): Of the trainer's batches and its loss.
        errors ([`KeptErrors`]): What failed here, until all processes hear of it.
    """

    settings: Settings
    buffer: ReplayBuffer
    scope: Scope
    hooks: CheckedHooks
    fields: FieldTable
    tasks: Tasks
    num_generations: int
    loss: OfLoss = field(default_factory=OfLoss)
    mixes_rows: bool = False
    forwards_to_record: bool = False
    processes: int = 1
    success: Success = field(default_factory=Success)
    layout: Layout = field(default_factory=Layout)
    errors: KeptErrors = field(init=False)

    def __post_init__(self) -> None:
        self.errors = KeptErrors(alone=self.processes == 1)

    def correct(self, rows: ReplayedRows) -> Corrected:
        """Return what the correction gives replayed rows, within bounds and gates."""
        corrected = self.hooks.correct(rows, self.buffer.local_context(), self.errors.check)
        return self.loss.gates(rows, self.loss.bounds(rows, corrected))

    def weight_before_the_loss(self, age: int, chance: float) -> float:
        """Return the loss weight that the correction gives a row of which no log-probs are known yet.

        Args:
            age (`int`): Updates since generation.
            chance (`float`): Of being drawn first, relative to the least likely eligible entry.
        """
        unknown = torch.zeros(1, 1)
        rows = ReplayedRows(
            logps=unknown,
            behavior_logps=unknown,
            proximal_logps=unknown,
            mask=torch.ones(1, 1, dtype=torch.bool),
            advantages=torch.ones(1),
            ages=torch.tensor([age]),
            priorities=torch.tensor([chance]),
        )
        weights = self.hooks.correct(rows, self.buffer.local_context()).weights
        return 1.0 if weights is None else float(weights.flatten()[0])
