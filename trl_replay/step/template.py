"""The generation batch on which further iterations are composed (`replay_iterations="replay"`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..loss.tap import Expected
from .fresh_batch import FreshBatch


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
