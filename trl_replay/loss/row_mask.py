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
        if self.denominator == "tokens" and bool((flags & EXCLUDED).any()):
            return _without_excluded(micro, flags)
        return None

    def returned(
        self,
        result: tuple[Any, ...],
        micro: Mapping[str, Any],
        flags: torch.Tensor,
        masked: torch.Tensor | None,
        scale: torch.Tensor | float | None,
    ) -> tuple[Any, ...]:
        """Return the log-prob method's result with the gradients that are left of its entropies and auxiliary loss.

        The entropy bonus is the mean over those tokens of the micro-batch that are in the policy term's denominator,
        whatever the loss divides by; its logged value stays that over all tokens. An auxiliary loss stays as it was.

        Args:
            result (`tuple`): Log-probs `(b, C)`, entropies `(b, C)` and more.
            micro (`Mapping`): The micro-batch.
            flags (`(b,)` int64): Second column of the row ids.
            masked (`(b, C)` or `(b, 1)` bool, *optional*): Tokens without an entropy gradient.
            scale (`torch.Tensor` or `float`, *optional*): What the loss will be multiplied by.
        """
        if masked is None and scale is None:
            return result
        logps, *others = result
        for number, value in enumerate(others):
            if not torch.is_tensor(value) or not value.requires_grad:
                continue
            if value.shape == logps.shape:
                kept = value if masked is None else torch.where(masked, value.detach(), value)
                factor = _without_excluded(micro, flags) / (1.0 if scale is None else scale)
                others[number] = value.detach() + (kept - value.detach()) * factor
            elif value.dim() == 0 and scale is not None:
                others[number] = value / scale
        return logps, *others


def _without_excluded(micro: Mapping[str, Any], flags: torch.Tensor) -> torch.Tensor:
    """Trained tokens of a micro-batch over those of its rows that are not excluded; 1 where nothing is left."""
    mask = loss_mask(micro)
    excluded = (flags & EXCLUDED).bool().to(mask.device)
    kept = mask[~excluded].sum()
    return torch.where(kept > 0, mask.sum() / kept.clamp(min=1), 1.0)


NOTHING_MASKED = RowMask()
"""All rows train as stock has them."""
