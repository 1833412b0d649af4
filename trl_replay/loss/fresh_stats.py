"""Statistics of fresh rows alone, which TRL's log would show had nothing been replayed: KL, entropy and clipping."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import OLD_LOGPS, REF_LOGPS, LossForm
from ..transfer import fetch
from .bounds import row_means
from .micro_batch import MicroBatch


class FreshStats:
    """Sums over the fresh rows of all micro-batches since the last log, kept on the training device until then.

    Args:
        form ([`LossForm`]): How the loss makes ratios.
    """

    def __init__(self, form: LossForm) -> None:
        self._form = form
        self._sums: dict[str, list[torch.Tensor]] = {}

    def add(self, micro: MicroBatch, logps: torch.Tensor, entropies: Any, mask: torch.Tensor) -> None:
        """Notes one micro-batch, as TRL made it.

        Args:
            micro ([`MicroBatch`]): With the old and the reference log-probs of its fresh rows, where there are any.
            logps (`(b, C)`): The policy's, detached.
            entropies (`(b, C)`, *optional*): As the log-prob method returned them.
            mask (`(b, C)` bool): Tokens of fresh rows that the loss trains on.
        """
        old = micro.peek(OLD_LOGPS)
        logs = torch.zeros_like(logps) if old is None else logps - old
        logs.masked_fill_(~mask, 0.0)
        if self._form.sequence_level:
            logs = row_means(logs, mask)
        ratios = logs.exp()  # (b, C) or (b, 1)
        if torch.is_tensor(entropies):
            self._note("entropy", entropies.detach(), mask)
        reference = micro.peek(REF_LOGPS)
        if reference is not None:
            gap = reference - logps
            kl = gap.exp() - gap - 1
            if self._form.weighs_kl:
                kl = kl * ratios
            self._note("kl", kl, mask)
        high = self._form.clip_high
        if high is not None:
            clipped = self._clipped(ratios, micro["advantages"], high)
            by_row = clipped.size(1) == 1
            counted = mask.any(dim=1, keepdim=True) if by_row else mask
            self._note("clip_ratio", clipped, counted)

    def metrics(self) -> dict[str, float]:
        """Means since the last call, over tokens (of clipping at sequence level, over rows); none where there were no
        fresh rows."""
        values = {}
        over_all = {}
        for name, sums in self._sums.items():
            over_all[name] = torch.stack(sums).sum(dim=0)
        for name, found in fetch(over_all).items():
            total, count = found.tolist()
            if count:
                values[f"replay/fresh_{name}"] = total / count
        self._sums = {}
        return values

    def _clipped(self, ratios: torch.Tensor, advantages: torch.Tensor, high: float) -> torch.Tensor:
        """Marks ratios that the loss clips; `(b, 1)` where both these and the advantages are a row's, else `(b,
        C)`."""
        advantages = advantages.view(len(ratios), -1)
        clipped = (ratios > high) & (advantages > 0)
        if self._form.clip_low is not None:
            low = (ratios < self._form.clip_low) & (advantages < 0)
            clipped = clipped | low
        return clipped

    def _note(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        counted = torch.where(mask, values.float(), 0.0)
        count = mask.sum().float()
        sums = self._sums.setdefault(name, [])
        sums.append(torch.stack([counted.sum(), count]))
