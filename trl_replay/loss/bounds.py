"""Bounds on what a replayed token can do to an update, however far the policy has moved from it.

A fresh token's importance ratio is 1, and its KL term is small, since the policy has just drawn it: a reference that
finds it 20 times as likely meets fewer than one token in 20. Of a replayed token neither holds. PPO's clipping leaves
the ratio of a negative advantage alone, so that its gradient grows with the ratio; the KL term's grows with
exp(reference − log-prob), and where that is infinite and the ratio is 0, the gradient is NaN. Fresh rows keep the
stock formulas as they are, and so do replayed ones within the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from ..compat import LossForm
from ..data.types import LOG_RATIO_LIMIT, Corrected, ReplayedRows
from .means import Means

RATIO_LIMIT = 20.0
"""Most that the importance ratio, or exp(reference − log-prob), multiplies a replayed token's gradient by.

Trainers that bound the ratio of negative advantages do so at 3 (dual-clip PPO, arXiv 1912.09729), at 4 (INTELLECT-2's
`delta`) or at 5 (CISPO). This is a last resort and no opinion of its own, so it stands well above: of 40,000 such
tokens replayed in 500 updates of the sparse benchmark task, two were beyond it.
"""
LOG_OF_LIMIT = math.log(RATIO_LIMIT)
REACH = 10.0
"""Mean deviations of a token that are eight standard deviations of a normal distribution: a made-up row moves half as
much as a sampled one (SmolLM2 under bfloat16 autocast: 0.020 nats for 0.037)."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far log-probs move at equal weights between batches of other shapes, in nats: rounding, and dropout.

    Attributes:
        token_mean (`float`): Of a token, in the mean.
        token_max (`float`): The most of a token that was seen.
        tokens (`int`): Tokens of a completion.
        dropout (`float`): The part of `token_mean` that is dropout's; 0 without.
    """

    token_mean: float
    token_max: float
    tokens: int
    dropout: float = 0.0

    @property
    def sequence_mean(self) -> float:
        """Of the mean over a completion of `tokens` tokens, in the mean: errors of tokens are taken as independent."""
        return self.token_mean / math.sqrt(self.tokens)

    def __str__(self) -> str:
        part = f", {self.dropout / self.token_mean:.0%} of it dropout" if self.dropout else ""
        return (
            f"at equal weights a token's log-prob moves by {self.token_mean:.2g} nats (at most {self.token_max:.2g}"
            f"{part}), the mean of a completion by {self.sequence_mean:.2g}"
        )

    def reach(self, lengths: torch.Tensor) -> torch.Tensor:
        """The log ratios that noise alone reaches in the mean over so many tokens, of the shape of `lengths`."""
        return REACH * self.token_mean / lengths.clamp(min=1).sqrt()


@dataclass(slots=True)
class Bounds:
    """Keeps the ratio and the KL term of replayed tokens within bounds.

    * The log ratio that the loss forms is kept between −20 and log 20, with sequence-level importance sampling that of
      the row; within ±20 where the loss sums log ratios and damps the sum itself. In types with a small range 20 is
      half the log of their largest number. That is done by moving the old log-prob.
    * A row whose ratio noise alone may have made is on-policy, where the clip range of sequences is narrower than the
      noise: its ratio is 1, or the clip would take at random what is not stale at all.
    * The KL term of a token is dropped where exp(reference − log-prob), times the ratio if the loss multiplies the KL
      term by it, is more than 20. A clamp would not do: at its edge the gradient is exp(20). The other side, where the
      reference finds the token less likely, is clamped to −20: there the gradient grows in a straight line at most.

    Attributes:
        form ([`LossForm`]): How the loss makes ratios.
        means ([`Means`]): The shares of replayed tokens whose KL term was dropped, and whose ratio the loss clips.
        noise ([`Noise`], *optional*): The model's, where it is known.
    """

    form: LossForm = field(default_factory=LossForm)
    means: Means = field(default_factory=Means)
    noise: Noise | None = None

    def __call__(self, rows: ReplayedRows, corrected: Corrected) -> Corrected:
        """Move old log-probs near enough to the new ones; those that are near stay unchanged."""
        logs = _log_ratios(rows, corrected.old_logps)
        limit = _log_limit(rows.logps.dtype)
        if self.form.sums_ratios:
            bounded = logs.clamp(-limit, limit)
        elif self.form.sequence_level:
            bounded = logs.clamp(-limit, limit)
            excess = row_means(bounded, rows.mask) - LOG_OF_LIMIT
            bounded = bounded - excess.clamp(min=0.0)
            if self.noise is not None:
                reach = self.noise.reach(rows.mask.sum(dim=1, keepdim=True).to(logs))
                is_noise = (row_means(bounded, rows.mask).abs() <= reach) & (reach > self.form.narrowest)
                bounded = bounded.masked_fill(is_noise, 0.0)
        else:
            bounded = logs.clamp(-limit, LOG_OF_LIMIT)
        moved = rows.logps - bounded
        old_logps = torch.where(bounded != logs, moved, corrected.old_logps)
        return replace(corrected, old_logps=old_logps)

    def note_clipping(self, rows: ReplayedRows, old_logps: torch.Tensor, trained: torch.Tensor) -> None:
        """Note the share of replayed tokens, of rows at sequence level, whose ratio the loss clips.

        Args:
            rows ([`ReplayedRows`]): What the tap saw.
            old_logps (`(R, C)`): What the loss takes as the old log-probs, within bounds.
            trained (`(R, C)` bool): Tokens whose policy term counts.
        """
        if self.form.clip_high is None:
            return
        logs = _log_ratios(rows, old_logps)
        if self.form.sequence_level:
            logs = row_means(logs, rows.mask)
            self.means.add("replay/sequence_drift_mean", logs.abs(), trained.any(dim=1, keepdim=True))
        taken = clipped(self.form, logs.exp(), rows.advantages)
        by_row = taken.size(1) == 1
        self.means.add("replay/clip_ratio", taken, trained.any(dim=1, keepdim=True) if by_row else trained)

    def reference(
        self, rows: ReplayedRows, old_logps: torch.Tensor, reference_logps: torch.Tensor, trained: torch.Tensor
    ) -> torch.Tensor:
        """The reference's log-probs that the loss shall see; the new policy's own where the KL term is dropped.

        Args:
            rows ([`ReplayedRows`]): What the tap saw.
            old_logps (`(R, C)`): What the loss takes as the old log-probs, within bounds.
            reference_logps (`(R, C)`): The reference model's.
            trained (`(R, C)` bool): Tokens whose KL term counts.
        """
        limit = _log_limit(rows.logps.dtype)
        gap = reference_logps - rows.logps
        size = gap.clamp(min=0.0)  # of the KL term's gradient, as a logarithm
        if self.form.weighs_kl:
            logs = _log_ratios(rows, old_logps)
            if self.form.sequence_level:
                logs = row_means(logs, rows.mask)
            if not self.form.sums_ratios:
                logs = logs.clamp(max=LOG_OF_LIMIT)  # bounded already, up to the rounding of the old log-prob
            size = size + logs
        kept = (gap <= limit) & (size <= LOG_OF_LIMIT)  # a gap of NaN is not kept
        dropped = trained & ~kept
        self.means.add("replay/kl_dropped_fraction", dropped, trained)
        lowest = rows.logps - limit
        near = torch.where(gap < -limit, lowest, reference_logps)
        own = rows.logps.to(near.dtype)
        return torch.where(kept, near, own)


def clipped(form: LossForm, ratios: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Mark ratios, `(R, C)` or `(R, 1)`, that the loss clips; `(R, 1)` where both these and the advantages are a
    row's, else `(R, C)`."""
    advantages = advantages.view(len(ratios), -1)
    high = math.inf if form.clip_high is None else form.clip_high
    taken = (ratios > high) & (advantages > 0)
    if form.clip_low is None:
        return taken
    return taken | ((ratios < form.clip_low) & (advantages < 0))


def _log_limit(dtype: torch.dtype) -> float:
    """Largest log ratio: the product of two such ratios is finite in this type."""
    largest = math.log(torch.finfo(dtype).max)
    return min(LOG_RATIO_LIMIT, largest / 2)


def _log_ratios(rows: ReplayedRows, old_logps: torch.Tensor) -> torch.Tensor:
    """`(R, C)`: those that the loss forms, 0 where it does not train."""
    logs = rows.logps - old_logps
    return logs.masked_fill(~rows.mask, 0.0)


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(R, 1)`: mean over a row's trained tokens."""
    total = (values * mask).sum(dim=1, keepdim=True)
    count = mask.sum(dim=1, keepdim=True)
    return total / count.clamp(min=1)
