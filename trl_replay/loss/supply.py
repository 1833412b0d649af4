"""Supplies the loss for replayed rows: their stored log-probs, as the correction decides, and their weights."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ..base.progress import CheckLater, check_at_once, send, to_cpu
from ..batch.compose import loss_mask
from ..compat import LOSS, OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS, LossForm
from ..data.counters import DRIFT, GATED, SEQUENCE_DRIFT, WEIGHTS
from ..data.types import ADVANTAGES, LOG_RATIO_LIMIT, Corrected, Ints, Placement, ReplayedRows
from ..errors import ResultError, SeamError

ROWS = "trl_replay_rows"
"""Batch key of the row ids, `(B, 2)` int64 on the CPU. First column: 1 + candidate row, -1 - replayed row, or 0.
Second: the flags `COMPOSED` (the batch's padding is ours, not the model's), `SILENT` (the row trains nothing),
`EXCLUDED` (it is out of the loss's denominator) and `WITHOUT_KL`."""
COMPOSED, SILENT, EXCLUDED, WITHOUT_KL = 1, 2, 4, 8


class ReadNotes(dict[str, Any]):
    """A copy of a batch that notes in `read` which keys are read, or asked for by `in`."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        self.read.add(key)
        return super().get(key, default)


class MicroBatch:
    """One call of the loss that calls no other: the mapping that it reads, and what the tap knows of its rows.

    Args:
        inputs (`Mapping`): What the loss was given.
        rows (`(b, 2)` int64, on the CPU): See `ROWS`.
        sent (`(b, 2)`, *optional*): The same on the training device.

    Attributes:
        batch (`Mapping`): What it reads: the same, or a shallow copy, which alone may be written to.
        ids, flags (`list[int]`): The columns of `ROWS`.
        replayed (`list[int]`): Places of the replayed rows.
        tapped (`bool`): Whether the log-probs came, and all was written.
        entropies (`(b, C)`, *optional*): The policy's, detached, while the loss is still to choose among them.
        high_entropy (`(b, C)` bool, *optional*): What it chose by `top_entropy_quantile`.
        probe (`()`, *optional*): A factor of 1 on advantages that the loss had read before: has it a gradient, the
            loss uses the present ones.
    """

    def __init__(self, inputs: Any, rows: torch.Tensor, sent: torch.Tensor | None = None) -> None:
        self.inputs = self.batch = inputs
        self.rows = rows
        self._sent = sent
        pairs: list[list[int]] = rows.tolist()
        self.ids = [row for row, _ in pairs]
        self.flags = [flags for _, flags in pairs]
        self._some = 0
        for flags in self.flags:
            self._some |= flags
        self.replayed = [place for place, row in enumerate(self.ids) if row < 0]
        self.asked = False
        self.tapped = False
        self.entropies: torch.Tensor | None = None
        self.high_entropy: torch.Tensor | None = None
        self.probe: torch.Tensor | None = None
        self._before: dict[str, Any] = {}  # of keys that were written: what the loss was given, and the value of ours
        self._ours: dict[str, tuple[torch.Tensor, int]] = {}

    def has(self, flag: int) -> bool:
        """Tell whether a row has a flag."""
        return bool(self._some & flag)

    def marked(self, flag: int) -> torch.Tensor:
        """`(b,)` bool on the training device: the rows that have a flag."""
        return (self._on_device[:, 1] & flag).ne(0)

    @property
    def are_replayed(self) -> torch.Tensor:
        """`(b,)` bool on the training device: the replayed rows."""
        return self._on_device[:, 0] < 0

    @property
    def _on_device(self) -> torch.Tensor:
        if self._sent is None:
            self._sent = send({0: self.rows}, self.mask.device)[0]
        return self._sent

    @property
    def mask(self) -> torch.Tensor:
        """`(b, C)`: the tokens that the loss trains on."""
        return loss_mask(self.batch)

    def peek(self, key: str) -> Any:
        """The value of a key, or None."""
        return self.batch.get(key)

    def write(self, key: str, value: torch.Tensor) -> None:
        """Give a key another value in the copy."""
        self._before.setdefault(key, self.peek(key))
        self._ours[key] = value, value._version
        self.batch[key] = value

    def keep(self, key: str, kept: torch.Tensor, logps: torch.Tensor) -> None:
        """Keep log-probs where `kept`, `(b, C)` bool, and put `logps` elsewhere; nothing if it has no such key."""
        value = self.peek(key)
        if value is not None:
            self.write(key, torch.where(kept, value, logps.to(value.dtype)))

    def silence(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Take rows, `(b,)` bool, out of the policy and the KL term, in value and gradient; `logps` are the
        policy's, `(b, C)`."""
        tokens = rows.unsqueeze(1)
        advantages = self.peek(ADVANTAGES)
        self.write(ADVANTAGES, advantages.masked_fill(rows if advantages.dim() == 1 else tokens, 0.0))
        kept = self.mask.bool() & ~tokens
        self.keep(OLD_LOGPS, kept, logps)
        self.keep(REF_LOGPS, kept, logps)

    def give_back(self) -> None:
        """Put into the trainer's batch what the loss has put into the copy, as it would have without replay.

        Raises:
            SeamError: It has changed a value of ours, which must not stay there.
        """
        if self.batch is self.inputs:
            return
        for key, (value, version) in self._ours.items():
            if self.peek(key) is not value or value._version != version:
                raise SeamError(
                    f"{LOSS} changed {key!r} of its batch after it had asked for the log-probs, where replay gives "
                    "replayed rows other values. Change it before, or a copy of it, or train without replay: "
                    "use_replay=False."
                )
        left, known = {**self.batch, **self._before}, {*self.inputs}
        self.inputs.update({key: value for key, value in left.items() if value is not None or key in known})


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
    numbers = iter(to_cpu({0: torch.cat(tensors).double()})[0].tolist())
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
      the row; within ±20 where the loss sums log ratios and damps the sum itself, and multiplies no KL term by one: a
      large one times the rounding of a dropped term would hide the gradient. In types with a small range 20 is half
      the log of their largest number. That is done by moving the old log-prob.
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
            bounded = logs.clamp(-limit, LOG_OF_LIMIT if self.form.weighs_kl else limit)
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
            self.means.add(SEQUENCE_DRIFT, logs.abs(), trained.any(dim=1, keepdim=True))
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
            size = size + logs.clamp(max=LOG_OF_LIMIT)  # bounded already, up to the rounding of the old log-prob
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
            given, signs = (values.view(len(mask), -1) for values in (weights, rows.advantages))
            of_rows = max(given.shape[1], signs.shape[1]) == 1
            tokens, weighed = mask.sum(dim=1, keepdim=True) if of_rows else mask, []
            for side in (signs > 0, signs < 0):
                weighed += [(tokens * side).sum(), (tokens * side).mul_(given).sum()]
            silent = given.eq(0) | tokens.eq(0)
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


@dataclass(slots=True)
class Placed:
    """The `N` replayed rows of one batch of this process: see [`Supply.place_again`].

    Attributes:
        first (`int`): The number of the first.
        lengths (`list[int]`): Completion tokens of each.
        tensors (`dict[str, torch.Tensor]`): Of each, on the training device once the batch is: `logps`, the behavior
            log-probs, `(N, C)` float32 padded with 0; `ages`, updates since it was generated; `priorities`, its
            group's chance of being drawn, relative to the least likely one's; and `advantages`, in the composed batch,
            `(N,)` or `(N, C)`.
        proximal (`list`): Of each, the log-probs of its first training forward since it was drawn: those of all rows
            of that forward, `(R, C)`, and its place among them. None before.
    """

    first: int = 0
    lengths: list[int] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    proximal: list[tuple[torch.Tensor, int] | None] = field(default_factory=list)


class Supply:
    """The replayed rows of one generation batch.

    Args:
        correct (`Callable`): What the correction decides for the replayed rows of a micro-batch.
        bounds ([`Bounds`]): On the reference's log-probs.
        token_weights (`bool`): Whether the correction may give one weight a token.
        check (`Callable`): Looks at what the correction gave: [`KeptErrors.check`].

    Attributes:
        stats ([`OffPolicyStats`]): What was seen of them.
        placed ([`Placed`]): They themselves.
    """

    def __init__(
        self, correct: Callable[[ReplayedRows], Corrected], bounds: Bounds, token_weights: bool, check: CheckLater
    ) -> None:
        self._correct = correct
        self._bounds = bounds
        self._token_weights = token_weights
        self._check = check
        self.stats = OffPolicyStats()
        self.placed = Placed()

    def place(self, placements: Sequence[Placement], ids: Ints, advantages: torch.Tensor) -> None:
        """Begin a generation batch.

        Args:
            placements (`Sequence[Placement]`): What was replayed on this process.
            ids (`(B,)` int64): The first column of `ROWS`; gets the replayed rows' numbers.
            advantages (`(B,)`, `(B, 1)`, or `(B, C)`): Of the composed batch, on the CPU.
        """
        first = self.placed.first + len(self.placed.lengths)
        logps: list[NDArray[np.float32]] = []
        rows: list[int] = []
        for placed in placements:
            begins = [0, *placed.group.completion_lengths.cumsum().tolist()]
            stored = placed.group.tensors[OLD_LOGPS].float().numpy()
            numbers = range(placed.first, placed.first + placed.count)
            logps += [stored[begins[row] : begins[row + 1]] for row in numbers]
            rows += range(placed.start, placed.start + placed.count)
        lengths = [len(of_row) for of_row in logps]
        self.placed = Placed(first, lengths, proximal=[None] * len(rows))
        if not rows:
            return
        ids[rows] = np.arange(-1 - first, -1 - first - len(rows), -1)
        padded = np.zeros((len(rows), max(lengths)), np.float32)
        for row, values in enumerate(logps):
            padded[row, : len(values)] = values
        own = advantages.index_select(0, torch.tensor(rows))
        of_rows = [placed for placed in placements for _ in range(placed.count)]
        self.placed.tensors = {
            "logps": torch.from_numpy(padded),
            "ages": torch.tensor([placed.age for placed in of_rows]),
            "priorities": torch.tensor([placed.priority for placed in of_rows], dtype=torch.float32),
            "advantages": own if own.numel() > len(own) else own.reshape(-1),
        }

    def place_again(self, placed: Placed) -> None:
        """Go back to an earlier batch."""
        self.placed = placed

    def put_into(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor | None:
        """Give a composed micro-batch the replayed rows' log-probs and weights, and the policy's own log-probs where
        the loss must not see stored ones.

        Stored values are padded with 0, which against a very unlikely pad token gives inf * 0 in the loss; so would
        the ratio of a row without weight that is far off. A token without weight among others keeps its ratio, which
        counts in its sequence's; its KL is that to the policy itself, 0 in value and gradient.

        Args:
            micro ([`MicroBatch`]): Changes.
            logps (`(b, C)`): The policy's, detached.

        Returns:
            `(b, C)` bool, the replayed tokens whose weight is 0; None where the correction gave no weights.
        """
        mask = micro.mask.bool()
        weightless = self._replace(micro, logps, mask) if micro.replayed else None
        rows_with_any = mask if weightless is None else mask & ~weightless.all(dim=1, keepdim=True)
        micro.keep(OLD_LOGPS, rows_with_any, logps)
        micro.keep(REF_LOGPS, mask if weightless is None else mask & ~weightless, logps)
        return weightless

    def _replace(self, micro: MicroBatch, logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Ask the correction about the replayed rows, and do as it says; return the tokens without weight."""
        numbers = self._numbers([micro.ids[place] for place in micro.replayed])
        index, of_placed = send({0: torch.tensor([micro.replayed, numbers])}, logps.device)[0].unbind()
        trained = mask.index_select(0, index)
        if micro.has(SILENT):
            trained = trained & ~micro.marked(SILENT).index_select(0, index).unsqueeze(1)
        given = micro.peek(ADVANTAGES).index_select(0, index)
        rows = self._replayed_rows(numbers, of_placed, logps.index_select(0, index), trained, given)
        corrected = fitting(rows, self._correct(rows), self._token_weights, self._check)
        self.stats.add(rows, corrected.weights)
        weightless = None
        if corrected.weights is not None:
            weightless = corrected.weights.eq(0).view(len(numbers), -1).expand_as(trained)
            trained = trained & ~weightless
        if corrected.weights is not None or corrected.shift is not None:
            micro.write(ADVANTAGES, _signal(micro.peek(ADVANTAGES), index, corrected, logps.size(1)))
        self._write_logps(micro, index, logps, mask, rows, corrected.old_logps, trained)
        return None if weightless is None else _with_rows(torch.zeros_like(mask), index, weightless)

    def _write_logps(
        self,
        micro: MicroBatch,
        index: torch.Tensor,
        logps: torch.Tensor,
        mask: torch.Tensor,
        rows: ReplayedRows,
        old_logps: torch.Tensor,
        weighted: torch.Tensor,
    ) -> None:
        """Write the old, sampling and reference log-probs of the rows `index`.

        Args:
            micro ([`MicroBatch`]): Changes.
            index (`(R,)` int64): The replayed rows.
            logps, mask (`(b, C)`): The policy's log-probs, and the tokens that the loss trains on.
            rows ([`ReplayedRows`]): The replayed rows.
            old_logps (`(R, C)`): What the correction decided.
            weighted (`(R, C)` bool): Their tokens that train, and have a weight.
        """
        given = micro.peek(OLD_LOGPS)
        old = logps if given is None else given
        if micro.peek(SAMPLING_LOGPS) is None:  # TRL's off-policy mask would take the corrected old log-probs for them
            micro.write(SAMPLING_LOGPS, _with_rows(old, index, rows.behavior_logps))
            micro.keep(SAMPLING_LOGPS, mask, logps)
        micro.write(OLD_LOGPS, _with_rows(old, index, old_logps))
        self._bounds.note_clipping(rows, old_logps, weighted)
        reference = micro.peek(REF_LOGPS)
        if reference is not None:
            bounded = self._bounds.reference(rows, old_logps, reference.index_select(0, index), weighted)
            micro.write(REF_LOGPS, _with_rows(reference, index, bounded))

    def _numbers(self, ids: Sequence[int]) -> list[int]:
        numbers = [-1 - row - self.placed.first for row in ids]
        if min(numbers) < 0 or max(numbers) >= len(self.placed.lengths):
            raise SeamError(
                "A micro-batch holds replayed rows of an earlier generation batch, whose log-probs are gone. Train "
                "on each batch before the next one is generated."
            )
        return numbers

    def _replayed_rows(
        self, numbers: list[int], index: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor, given: torch.Tensor
    ) -> ReplayedRows:
        """Return what a correction sees.

        Args:
            numbers, index (`(R,)`): The rows' places among those placed; on the device, too.
            logps, mask (`(R, C)`): The policy's log-probs, and the tokens that train.
            given (`(R,)` or `(R, C)`): Advantages of the micro-batch.
        """
        placed, width = self.placed, logps.size(1)
        stored = {name: values.index_select(0, index) for name, values in placed.tensors.items()}
        behavior = _as_wide(stored["logps"], width)
        advantages = given
        if given.dim() == 2:  # the batch's: the trainer's loss may have added a part of its own for each token
            own = stored["advantages"]
            advantages = (own if own.dim() == 1 else _as_wide(own, width)).to(given)
        proximal = self._proximal(numbers, logps)
        return ReplayedRows(
            logps=logps,
            behavior_logps=torch.where(mask, behavior, logps.float()),
            proximal_logps=logps if proximal is logps else torch.where(mask, proximal, logps),
            mask=mask,
            advantages=advantages,
            ages=stored["ages"],
            priorities=stored["priorities"],
        )

    def _proximal(self, numbers: Sequence[int], logps: torch.Tensor) -> torch.Tensor:
        """Keep the log-probs of each row's first training forward since it was drawn, or of one that sees more of its
        tokens, and return them: `logps` itself where this is it."""
        placed, width = self.placed, logps.size(1)
        rows: list[tuple[torch.Tensor, int]] = []
        for place, number in enumerate(numbers):
            kept = placed.proximal[number]
            if kept is None or (kept[0].size(1) < width and kept[0].size(1) < placed.lengths[number]):
                kept = placed.proximal[number] = logps, place
            rows.append(kept)
        block = rows[0][0]
        is_same = block.shape == logps.shape and len(rows) == len(block)
        if is_same and all(row[0] is block and row[1] == place for place, row in enumerate(rows)):
            return block
        return torch.stack([_as_wide(rows_of[place : place + 1], width)[0] for rows_of, place in rows])


def _as_wide(values: torch.Tensor, width: int) -> torch.Tensor:
    """`(R, width)`: values with 0 where there are none, or without the last, as wide as what the loss reads: an
    override may trim it."""
    missing = width - values.size(1)
    return functional.pad(values, (0, missing)) if missing else values


def fitting(
    rows: ReplayedRows, corrected: Corrected, token_weights: bool, check: CheckLater = check_at_once
) -> Corrected:
    """The same with one weight a row where the loss's ratio is not each token's own, and tokens can't have theirs
    (`token_weights`).

    Raises:
        ResultError: Tokens of a row differ in it.
    """
    weights = corrected.weights
    if weights is None or weights.dim() == 1 or token_weights:
        return corrected
    signal = rows.advantages.view(len(weights), -1)
    if corrected.shift is not None:
        signal = signal + corrected.shift.to(signal).unsqueeze(1)
    counts = rows.mask & signal.ne(0)
    highest = weights.masked_fill(~counts, -torch.inf).amax(dim=1)
    lowest = weights.masked_fill(~counts, torch.inf).amin(dim=1)
    check((highest <= lowest).all(), _refuse_token_weights)
    return replace(corrected, weights=torch.where(counts.any(dim=1), highest, 1.0))


def _refuse_token_weights(is_one: bool) -> None:
    if not is_one:
        raise ResultError(
            "The correction gives token weights, which are exact only with importance_sampling_level='token'; one "
            "that goes by the sign of an advantage gives them to rows whose tokens have both. Use a correction "
            "with one weight a row, or set importance_sampling_level='token'."
        )


def _signal(advantages: torch.Tensor, index: torch.Tensor, corrected: Corrected, width: int) -> torch.Tensor:
    """`advantages`, `(B,)`, `(B, 1)` or `(B, C)`, with what a correction adds to the rows `index` and multiplies them
    by."""
    weights, shift = corrected.weights, corrected.shift
    if weights is not None and weights.dim() == 2 and (advantages.dim() == 1 or advantages.size(1) != width):
        advantages = advantages.view(len(advantages), 1).expand(-1, width)
    signal = advantages.index_select(0, index)
    if shift is not None:
        signal = signal + _beside(shift.to(signal), signal)
    if weights is not None:
        signal = signal * _beside(weights.to(signal), signal)
    return _with_rows(advantages, index, signal)


def _beside(values: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Rows' values as they are, or `(R, 1)` next to advantages of two dimensions."""
    return values if values.dim() == advantages.dim() else values.unsqueeze(1)


def _with_rows(values: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, `(b, …)`, with `rows`, `(R, …)`, at the places `index`."""
    return values.index_copy(0, index, rows.to(values.dtype))
