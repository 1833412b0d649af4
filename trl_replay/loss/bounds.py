"""Means, bounds, and gates: what the loss does with ratios, KL terms, and gradients of single rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..base.transfer import fetch
from ..compat import LossForm
from ..data.types import LOG_RATIO_LIMIT, Corrected, ReplayedRows


class Means:
    """Sums and counts by the name of a metric."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, values: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Note values, of a number type or bool, where `mask`, bool of the same shape, is set; None if all are 0."""
        count = mask.sum()
        total = torch.zeros_like(count) if values is None else torch.where(mask, values.float(), 0.0).sum()
        self._sums.setdefault(name, []).extend((total, count))

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the sums since the last call, `()` each: of each name, totals and counts in turn."""
        sums, self._sums = self._sums, {}
        return sums

    @staticmethod
    def metrics(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the means of what was taken, once it is fetched; none where nothing was seen."""
        found = {}
        for name, values in sums.items():
            total, count = np.array(values, np.float32).reshape(-1, 2).sum(axis=0).tolist()
            if count:
                found[name] = total / count
        return found


def fetch_sums(taken: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> list[dict[str, list[float]]]:
    """Fetch what several collectors have taken, in one copy from the device."""
    lists = [sums for of_one in taken for sums in of_one.values()]
    tensors = [tensor.reshape(-1) for sums in lists for tensor in sums]
    if not tensors:
        return [{} for _ in taken]
    numbers = iter(fetch({0: torch.cat(tensors).double()})[0].tolist())
    return [
        {name: list(itertools.islice(numbers, sum(map(torch.numel, sums)))) for name, sums in of_one.items()}
        for of_one in taken
    ]


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
