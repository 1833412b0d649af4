"""Statistics of fresh rows alone, which TRL's log would show had nothing been replayed: KL, entropy and clipping."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import OLD_LOGPS, REF_LOGPS, LossForm
from ..data.fields import ADVANTAGES
from .bounds import clipped, row_means
from .means import Means
from .micro_batch import MicroBatch


class FreshStats:
    """Looks at the fresh rows of all micro-batches.

    Args:
        form ([`LossForm`]): How the loss makes ratios.

    Attributes:
        means ([`Means`]): Over tokens; of clipping at sequence level, over rows.
    """

    def __init__(self, form: LossForm) -> None:
        self._form = form
        self.means = Means()

    def add(self, micro: MicroBatch, logps: torch.Tensor, entropies: Any, mask: torch.Tensor) -> None:
        """Note one micro-batch, as TRL made it.

        Args:
            micro ([`MicroBatch`]): With the old and the reference log-probs of its fresh rows, where there are any.
            logps (`(b, C)`): The policy's, detached.
            entropies (`(b, C)`, *optional*): As the log-prob method returned them.
            mask (`(b, C)` bool): Tokens of fresh rows that the loss trains on.
        """
        old = micro.peek(OLD_LOGPS)
        ratios: torch.Tensor | None = None  # (b, C) or (b, 1); None: all are 1, which no loss clips
        if old is not None or (self._form.clip_high or 1.0) < 1.0:
            logs = (logps - (logps if old is None else old)).masked_fill_(~mask, 0.0)
            ratios = (row_means(logs, mask) if self._form.sequence_level else logs).exp()
        if torch.is_tensor(entropies):
            self.means.add("replay/fresh_entropy", entropies.detach(), mask)
        reference = micro.peek(REF_LOGPS)
        if reference is not None:
            gap = reference - logps
            kl = gap.exp() - gap - 1
            if self._form.weighs_kl and ratios is not None:
                kl = kl * ratios
            self.means.add("replay/fresh_kl", kl, mask)
        if self._form.clip_high is not None:
            advantages = micro.peek(ADVANTAGES)
            taken = None if ratios is None else clipped(self._form, ratios, advantages)
            by_row = advantages.view(len(mask), -1).size(1) == 1 and self._form.sequence_level
            counted = mask.any(dim=1, keepdim=True) if by_row else mask
            self.means.add("replay/fresh_clip_ratio", taken, counted)
