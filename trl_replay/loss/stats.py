"""What the loss shows of replayed rows, and of fresh ones alone."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compat import OLD_LOGPS, REF_LOGPS, LossForm
from ..data.counters import DRIFT, GATED, WEIGHTS
from ..data.fields import ADVANTAGES
from ..data.types import LOG_RATIO_LIMIT, ReplayedRows
from .bounds import Means, clipped, row_means
from .micro_batch import MicroBatch

FIGURES = 9
"""Sums of a micro-batch."""
UPDATES, NEARLY_ALL = 8, 0.95
"""Updates with replayed rows, and the share of these rows without any weight at which it is told."""


class OffPolicyStats:
    """Collects the figures of all replayed rows since the last log.

    They stay on the training device until somebody asks.
    """

    def __init__(self) -> None:
        self._since_log: list[torch.Tensor] = []
        self._rows = 0

    def add(self, rows: ReplayedRows, weights: torch.Tensor | None) -> None:
        """Note one micro-batch.

        Args:
            rows ([`ReplayedRows`]): What the tap saw.
            weights (`(R,)` or `(R, C)`, *optional*): What the policy term is multiplied by.
        """
        mask = rows.mask.double()

        def over_tokens(values: torch.Tensor) -> torch.Tensor:
            """`values` are changed: one after the other, so that few are there at a time."""
            return values.mul_(mask).sum()

        logs = rows.logps.float() - rows.behavior_logps.float()
        logs = logs.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        ratios = logs.exp()
        drift = over_tokens(logs.abs_())
        squares = over_tokens(ratios**2)
        ratio = over_tokens(ratios)
        weightless, *weighed = ratio.new_zeros(5)
        if weights is not None:
            weighed, signs = [], rows.advantages.view(len(mask), -1).sign()
            for sign in (1, -1):
                tokens = mask * signs.eq(sign)
                weighed += [tokens.sum(), tokens.mul_(weights.view(len(mask), -1)).sum()]
            silent = weights.eq(0).view(len(mask), -1) | ~rows.mask
            weightless = (silent.all(dim=1) & rows.mask.any(dim=1)).sum()
        self._since_log.append(torch.stack([mask.sum(), ratio, squares, drift, weightless, *weighed]))
        self._rows += len(mask)

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the sums since the last call, `(FIGURES,)` each; none if there were none."""
        sums, self._since_log = self._since_log, []
        return {"": sums} if sums else {}

    def metrics(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the metrics of the replayed rows of what was taken, once it is fetched."""
        if not sums:
            return {}
        tokens, ratio, squares, drift, weightless, *weighed = (sum(sums[""][at::FIGURES]) for at in range(FIGURES))
        values = {"replay/gated_fraction": weightless / self._rows}
        self._rows = 0
        if tokens:
            values["replay/ratio_mean"] = ratio / tokens
            values["replay/ess"] = ratio * ratio / (tokens * squares)
            values["replay/drift_mean"] = drift / tokens
        of_signs = zip(WEIGHTS, weighed[::2], weighed[1::2], strict=True)
        values |= {key: weight / count for key, count, weight in of_signs if count}
        return values


class MaskWatch:
    """Warns once where nearly all replayed rows of several updates were masked.

    Args:
        told (`str`): What masks them, and the remedy; empty where that is meant.
    """

    def __init__(self, told: str) -> None:
        self._told = told
        self._shares: deque[float] = deque(maxlen=UPDATES)
        self._has_warned = not told

    def __call__(self, measured: Mapping[str, float]) -> None:
        """Take note of an update's metrics; those without replayed rows tell nothing."""
        if self._has_warned or GATED not in measured:
            return
        self._shares.append(measured[GATED])
        share = sum(self._shares) / UPDATES
        if share >= NEARLY_ALL:
            self._has_warned = True
            drift = measured.get(DRIFT, 0.0)
            warnings.warn(
                f"Of the rows replayed in {UPDATES} updates, {share:.0%} were masked, so that replay teaches nothing "
                f"(mean |log ratio|: {drift:.2g}): {self._told}",
                stacklevel=2,
            )


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
