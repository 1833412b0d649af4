"""Rows that train nothing: those that a plugin's advantages mask, and dead groups that nothing fills
(`replay_unfilled`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch.compose import loss_mask
from .micro_batch import EXCLUDED


@dataclass(frozen=True, slots=True)
class RowMask:
    """The rows of one generation batch that train nothing, for the tap.

    Attributes:
        masked (`list[int]`): Rows of this process's batch without policy, KL or entropy gradient.
        excluded (`list[int]`): Those of them that are out of the loss's denominator, too.
        factor (`float`): Rows of all processes / those of them that are not excluded.
        denominator (`str`): What this trainer's loss divides by: `"items"` (the batch's token count, which is
            corrected there), `"tokens"` (of the micro-batch) or `"rows"`. Empty if nothing is excluded.
    """

    masked: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    factor: float = 1.0
    denominator: str = ""

    def scale(self, micro: Mapping[str, Any], flags: torch.Tensor) -> torch.Tensor | float | None:
        """Factor on a micro-batch's loss that takes excluded rows out of its denominator; None if there is none.

        Args:
            micro (`Mapping`): The micro-batch.
            flags (`(b,)` int64): Second column of the row ids.
        """
        if self.denominator == "rows" and self.factor != 1.0:
            return self.factor
        excluded = (flags & EXCLUDED).bool()
        if self.denominator == "tokens" and bool(excluded.any()):
            mask = loss_mask(micro)
            kept = ~excluded.to(mask.device)
            live = mask[kept].sum()
            factor = mask.sum() / live.clamp(min=1)
            unscaled = torch.ones_like(factor)
            return torch.where(live > 0, factor, unscaled)
        return None

    def returned(
        self, result: tuple[Any, ...], masked: torch.Tensor | None, scale: torch.Tensor | float | None
    ) -> tuple[Any, ...]:
        """The log-prob method's result, with no entropy gradient where `masked` (`(b, C)` or `(b, 1)` bool) is set,
        and with an auxiliary loss that `scale` leaves as it was."""
        if masked is None and scale is None:
            return result
        logps, *others = result
        for number, value in enumerate(others):
            if not torch.is_tensor(value) or not value.requires_grad:
                continue
            if value.shape == logps.shape and masked is not None:
                others[number] = torch.where(masked, value.detach(), value)
            elif value.dim() == 0 and scale is not None:
                others[number] = value / scale
        return logps, *others


NOTHING_MASKED = RowMask()
"""All rows train as stock has them."""
