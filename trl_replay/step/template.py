"""The generation batch on which further iterations are composed (`replay_iterations="replay"`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..batch.group_view import AdvantageRule
from ..distributed.row_layout import RowLayout
from ..loss.tap import Expected
from ..types import Batch, Groups


@dataclass(slots=True)
class Template:
    """One generation batch, kept until the next one.

    Attributes:
        batch (`dict`): The fresh batch, before anything was exchanged, without reference log-probs if only fresh rows
            have them.
        reference (`(B, C)`, *optional*): These.
        rows ([`RowLayout`]): Where its rows lie.
        fresh ([`Groups`]): Its groups, all of them dead: a further iteration may fill each slot.
        rule ([`AdvantageRule`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        expected ([`Expected`]): What the tap does about the composed batch.
        drawn (`dict[int, list[int]]`): Of the composed batch, by serial of an entry, the rows that it took.
        micro_batches (`list`, *optional*): The composed batch as the trainer buffers it, once an iteration has begun.
        step (`int`, *optional*): The trainer's count of micro-batches when an iteration last began.
    """

    batch: Batch
    reference: torch.Tensor | None
    rows: RowLayout
    fresh: Groups
    rule: AdvantageRule
    keys: frozenset[str]
    expected: Expected
    drawn: dict[int, list[int]]
    micro_batches: list[Any] | None = None
    step: int | None = None


def all_slots_empty(fresh: Groups) -> Groups:
    """The groups of a batch with every slot to be filled."""
    return replace(fresh, dead=np.ones(len(fresh), bool))
