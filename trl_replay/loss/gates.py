"""Gates on replayed rows inside the loss: their weights stay bounded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ..data.types import LOG_RATIO_LIMIT, Corrected, ReplayedRows
from .bounds import row_means
from .means import Means


@dataclass(slots=True)
class Gates:
    """`replay_weight` and `replay_max_weight`, on top of whatever the correction decided.

    Attributes:
        weight (`float`): Multiplies the policy term of replayed rows.
        max_weight (`float`, *optional*): Most that a token's policy term is multiplied by: the ratio that the loss
            forms to the old log-probs, before its own clipping, times all weights. With sequence-level importance
            sampling the same for rows.
        sequence_level (`bool`): Whether the loss forms one ratio a row.
        means ([`Means`]): The share of replayed tokens (with sequence-level importance sampling, rows) whose weight
            was capped.
    """

    weight: float = 1.0
    max_weight: float | None = None
    sequence_level: bool = False
    means: Means = field(default_factory=Means)

    def __call__(self, rows: ReplayedRows, corrected: Corrected) -> Corrected:
        """Apply the gates to what the correction decided."""
        weights = corrected.weights
        if self.weight != 1.0:
            given = rows.advantages.new_ones(len(rows.ages)) if weights is None else weights
            weights = given * self.weight
        if self.max_weight is not None:
            weights = self._cap(rows, corrected.old_logps, weights, self.max_weight)
        if weights is corrected.weights:
            return corrected
        return replace(corrected, weights=weights)

    def _cap(
        self, rows: ReplayedRows, old_logps: torch.Tensor, weights: torch.Tensor | None, most: float
    ) -> torch.Tensor:
        logs = rows.logps - old_logps
        mask = rows.mask
        of_tokens = weights is not None and weights.dim() == 2
        if self.sequence_level:
            logs = row_means(logs, mask)  # (R, 1)
            if not of_tokens:
                logs = logs.squeeze(1)
                mask = mask.any(dim=1)
        ratio = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if weights is None:
            weights = torch.ones_like(ratio)
        elif weights.dim() < ratio.dim():
            weights = weights.unsqueeze(1)
        total = ratio * weights
        over = (total > most) & mask
        self.means.add("replay/capped_fraction", over, mask)
        fitting = most / total
        return weights * torch.where(over, fitting, torch.ones_like(total))
