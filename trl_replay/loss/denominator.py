"""The loss's denominator without the rows that a plan masks, and the gradients of what stands next to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .micro_batch import EXCLUDED, MicroBatch


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a loss divides by, in one generation batch.

    Attributes:
        kind (`str`): `"items"` (the batch's token count, which is corrected there), `"tokens"` (of the micro-batch) or
            `"rows"`.
        factor (`float`): Rows of all processes over those that are not masked.
        of_bonus (`bool`): Whether the same divides the entropy bonus; else tokens of the micro-batch do.
    """

    kind: str = "items"
    factor: float = 1.0
    of_bonus: bool = False

    def scale(self, micro: MicroBatch) -> torch.Tensor | float | None:
        """Factor on a micro-batch's loss that takes excluded rows out of its denominator; None if there is none."""
        if self.kind == "rows" and self.factor != 1.0:
            return self.factor
        if self.kind == "tokens" and micro.has(EXCLUDED):
            return _without_excluded(micro)
        return None

    def returned(
        self,
        result: tuple[Any, ...],
        micro: MicroBatch,
        masked: torch.Tensor | None,
        scale: torch.Tensor | float | None,
    ) -> tuple[Any, ...]:
        """Return the log-prob method's result with the gradients that are left of its entropies and auxiliary loss.

        The entropy bonus is the mean over those tokens of the micro-batch that are in the policy term's denominator,
        and that `top_entropy_quantile` leaves, whatever the loss divides by; its logged value stays that over all
        tokens. An auxiliary loss stays as it was.

        Args:
            result (`tuple`): Log-probs `(b, C)`, entropies `(b, C)` and more.
            micro ([`MicroBatch`]): The micro-batch, to which TRL adds the tokens of the highest entropies later.
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
                kept = value.view_as(value) if masked is None else torch.where(masked, value.detach(), value)
                if scale is not None or (not self.of_bonus and micro.has(EXCLUDED)):

                    def mended(gradient: torch.Tensor) -> torch.Tensor:
                        factor = _without_excluded(micro, micro.high_entropy)
                        return gradient * (factor / (1.0 if scale is None else scale))

                    kept.register_hook(mended)  # type: ignore[no-untyped-call]  # torch does not type it
                others[number] = kept
            elif value.dim() == 0 and scale is not None:
                others[number] = value / scale
        return logps, *others


def _without_excluded(micro: MicroBatch, within: torch.Tensor | None = None) -> torch.Tensor:
    """Trained tokens of a micro-batch, or those `within` a `(b, C)` bool, over those of its rows that are not
    excluded; 1 where nothing is left."""
    mask = micro.mask if within is None else micro.mask * within
    kept = (mask * ~micro.marked(EXCLUDED).unsqueeze(1)).sum()
    return torch.where(kept > 0, mask.sum() / kept.clamp(min=1), 1.0)
