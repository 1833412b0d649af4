"""The behavior log-prob tap: records and supplies log-probs inside the training loss, without a forward of its own.

Where TRL leaves `old_per_token_logps` out of the batch, each fresh row's first training forward happens before the
optimizer moves, so that this forward's log-probs are those of the policy that generated the row. The tap keeps those
of candidates. For replayed rows it puts the stored ones, as the correction decides, into a shallow copy of the
micro-batch before the loss reads them. Rows that shall train nothing lose their advantage, KL and entropy gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..batch.compose import loss_mask
from ..buffer.candidates import Candidate
from ..compat import OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS
from ..errors import ResultError, SeamError
from ..progress import KeptErrors
from ..types import Batch, Corrected, Placement, ReplayedRows
from .bounds import Bounds
from .fresh_stats import FreshStats
from .handshake import Handshake
from .micro_batch import COMPOSED, EXCLUDED, MASKED, ROWS, MicroBatch, PlacedRow
from .off_policy_stats import OffPolicyStats
from .row_mask import NOTHING_MASKED, RowMask

EntropyControl: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Is told of each training loss the entropies `(b, C)`, the loss's mask `(b, C)`, and which rows are replayed."""


class Tap:
    """Wraps one trainer's loss and log-prob method.

    Attributes:
        handshake ([`Handshake`]): Whether the loss has been seen to read what the tap supplies.
        stats ([`OffPolicyStats`]): What was seen of replayed rows.
        fresh ([`FreshStats`]): What the loss computes, of the other rows.
    """

    def __init__(
        self,
        correct: Callable[[ReplayedRows], Corrected],
        num_generations: int,
        token_weights: bool,
        forward: bool,
        handshake: Handshake,
        errors: KeptErrors,
        bounds: Bounds | None = None,
        control_entropy: EntropyControl | None = None,
    ) -> None:
        self._correct = correct
        self._generations = num_generations
        self._token_weights = token_weights
        self.handshake = handshake
        self._errors = errors
        self._bounds = bounds or Bounds()
        self._control_entropy = control_entropy
        self._forward = forward
        self._current: MicroBatch | None = None
        self._candidates: dict[int, Candidate] = {}
        self._placed: list[PlacedRow] = []
        self._first_placed = 0
        self._row_mask = NOTHING_MASKED
        self.stats = OffPolicyStats()
        self.fresh = FreshStats(self._bounds.form)

    def expect(
        self,
        rows: int,
        candidates: Sequence[Candidate],
        placements: Sequence[Placement],
        composed: bool,
        row_mask: RowMask = NOTHING_MASKED,
    ) -> torch.Tensor:
        """The id tensor of a generation batch, whose candidates are recorded and whose replayed rows are supplied.

        Args:
            rows (`int`): Rows of this process's batch.
            candidates (`Sequence[Candidate]`): Those with local rows that lack log-probs.
            placements (`Sequence[Placement]`): What was replayed here.
            composed (`bool`): Whether any row was exchanged.
            row_mask ([`RowMask`], *optional*): Rows that train nothing.

        Returns:
            `(rows, 2)` int64, see `ROWS`.
        """
        ids = torch.zeros(rows, 2, dtype=torch.int64)
        ids[:, 1] = COMPOSED * composed
        ids[row_mask.masked, 1] |= MASKED
        ids[row_mask.excluded, 1] |= EXCLUDED
        self._row_mask = row_mask
        self.stats.clear()
        self._candidates = {candidate.serial: candidate for candidate in candidates}
        for candidate in candidates:
            count = candidate.rows.stop - candidate.rows.start
            candidate.records = [None] * count
            first = 1 + candidate.serial * self._generations
            ids[candidate.rows, 0] = torch.arange(first, first + count)
        self._first_placed += len(self._placed)
        self._placed = []
        for placed in placements:
            first = self._first_placed + len(self._placed)
            numbers = torch.arange(first, first + placed.count)
            ids[placed.rows, 0] = -1 - numbers
            self._placed += _placed_rows(placed)
        return ids

    def loss(self, stock: Callable[[Batch], torch.Tensor], inputs: Batch) -> torch.Tensor:
        """Runs the stock loss on a shallow copy of `inputs`, with the tap open.

        Raises:
            SeamError: The loss did not call the log-prob method with gradients, or did not read the old log-probs
            after it.
        """
        if ROWS not in inputs:
            return stock(inputs)
        micro = MicroBatch(inputs)
        micro.watched = self._forward  # another loss path may not call the tap: its batch holds everything already
        self._current = micro
        try:
            loss = stock(micro)
        finally:
            self._current = None
        self.handshake.check(micro)
        scale = self._row_mask.scale(micro, micro.rows[:, 1])
        return loss if scale is None else loss * scale

    def logps(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the wrapped log-prob method returned: log-probs `(b, C)`, entropies `(b, C)` and more; looked at once
        in each training loss.

        Returns:
            The same, but for rows and tokens that train nothing, whose entropies lose their gradient.
        """
        micro = self._current
        if micro is None or micro.tapped or not result[0].requires_grad:
            return result
        micro.tapped = True
        micro.watched = True
        logps = result[0].detach()
        self._record(micro.ids.tolist(), logps)
        self._note_fresh(micro, result)
        masked: torch.Tensor | None = None  # (b, C) or (b, 1) bool
        if bool((micro.flags & COMPOSED).any()):
            masked = self._supply_or_mask(micro, logps)
        dead = (micro.flags & MASKED).bool()
        if bool(dead.any()):
            dead = dead.to(logps.device)
            self._mask_rows(micro, dead, logps)
            silent = dead.unsqueeze(1)
            masked = silent if masked is None else masked | silent
        scale = self._row_mask.scale(micro, micro.flags)
        return self._row_mask.returned(result, masked, scale)

    def forget(self) -> None:
        """Records nothing more of the present generation batch, as after an update; what is recorded already stays."""
        self._candidates = {}

    def _record(self, ids: list[int], logps: torch.Tensor) -> None:
        for position, row in enumerate(ids):
            if row <= 0:
                continue
            serial, index = divmod(row - 1, self._generations)
            candidate = self._candidates.get(serial)
            if candidate is None:
                continue
            if candidate.records[index] is None:
                # a view would keep the other rows of its micro-batch until the next generation batch
                candidate.records[index] = logps[position].clone()
                if all(record is not None for record in candidate.records):
                    del self._candidates[serial]  # a row may come again before the update: its first forward counts
                    with suppress(
                        Exception
                    ):  # it happens again when the candidate is described, for all ranks to hear
                        candidate.complete()

    def _note_fresh(self, micro: MicroBatch, result: tuple[Any, ...]) -> None:
        """Keeps apart what the loss computes of fresh rows, before anything is changed for replayed ones."""
        logps = result[0].detach()
        others = [value for value in result[1:] if torch.is_tensor(value)]
        entropies = next((value for value in others if value.shape == logps.shape), None)
        mask = loss_mask(micro)
        replayed = micro.replayed.to(logps.device)
        fresh = mask.bool() & ~replayed.unsqueeze(1)
        self.fresh.add(micro, logps, entropies, fresh)
        if entropies is not None and self._control_entropy is not None:
            self._control_entropy(entropies, mask, replayed)

    def _supply_or_mask(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor | None:
        """`_supply`; on several processes an error is kept until all can raise it, and replayed rows train nothing."""
        try:
            return self._supply(micro, logps)
        except Exception as error:
            self._errors.keep(error)
            self._mask_rows(micro, micro.replayed.to(logps.device), logps)
            return None

    def _supply(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor | None:
        """Puts what the correction decides into a composed micro-batch, and the policy's own log-probs onto its pads.

        Returns:
            `(b, C)` bool, the replayed tokens whose weight is 0, if weights were given.
        """
        mask = loss_mask(micro).bool()
        masked = None
        if bool(micro.replayed.any()):
            masked = self._replace(micro, logps, mask)
        self._fill_pads(micro, logps, mask, masked)
        return masked

    def _replace(self, micro: MicroBatch, logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Gives the replayed rows of a micro-batch their old, sampling and reference log-probs, and their weights."""
        places = micro.replayed.nonzero().flatten()
        numbers = -1 - micro.ids[places]
        stored = self._stored(numbers.tolist())
        index = places.to(logps.device)
        trains = (micro.flags[places] & MASKED).eq(0).to(logps.device)
        rows = self._replayed(micro, stored, index, logps[index], mask[index] & trains.unsqueeze(1))
        corrected = self._correct(rows)
        weights = corrected.weights
        positions = [row.position for row in stored]
        self.stats.add(positions, rows, weights)
        masked: torch.Tensor | None = None
        trained = rows.mask
        if weights is not None:
            micro["advantages"] = self._weighted(micro["advantages"], index, weights, logps.size(1))
            weightless = weights.eq(0).view(len(stored), -1)
            masked = torch.zeros_like(mask)
            masked[index] = weightless.expand_as(rows.mask)
            trained = trained & ~weightless
        old = dict.get(micro, OLD_LOGPS)
        old = logps if old is None else old
        if SAMPLING_LOGPS not in micro:  # TRL's off-policy mask would take the corrected old log-probs for them
            sampling = _with_rows(old, index, rows.behavior_logps)
            micro[SAMPLING_LOGPS] = torch.where(mask, sampling, logps.to(sampling.dtype))
        micro[OLD_LOGPS] = _with_rows(old, index, corrected.old_logps)
        reference = dict.get(micro, REF_LOGPS)
        if reference is not None:
            bounded = self._bounds.reference(rows, corrected.old_logps, reference[index], trained)
            micro[REF_LOGPS] = _with_rows(reference, index, bounded)
        return masked

    def _fill_pads(
        self, micro: MicroBatch, logps: torch.Tensor, mask: torch.Tensor, masked: torch.Tensor | None
    ) -> None:
        """Puts the policy's own log-probs, `logps`, where the loss must not see the stored ones.

        Stored values are padded with 0, which against a very unlikely pad token gives inf * 0 in the loss; so would
        the ratio of a row without weight that is far off. A token without weight among others keeps its ratio, which
        counts in its sequence's; its KL is that to the policy itself, 0 in value and gradient.

        Args:
            mask (`(b, C)` bool): Tokens that the loss trains on.
            masked (`(b, C)` bool, *optional*): Those without weight.
        """
        real = {OLD_LOGPS: mask, REF_LOGPS: mask}
        if masked is not None:
            real[OLD_LOGPS] = mask & ~masked.all(dim=1, keepdim=True)
            real[REF_LOGPS] = mask & ~masked
        for key, tokens in real.items():
            value = dict.get(micro, key)
            if value is not None:
                micro[key] = torch.where(tokens, value, logps.to(value.dtype))

    def _stored(self, placed: list[int]) -> list[PlacedRow]:
        numbers = [row - self._first_placed for row in placed]
        known = range(len(self._placed))
        if not all(number in known for number in numbers):
            raise SeamError(
                "A micro-batch holds replayed rows of an earlier generation batch, whose log-probs are gone."
            )
        return [self._placed[number] for number in numbers]

    def _replayed(
        self, micro: MicroBatch, stored: list[PlacedRow], index: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor
    ) -> ReplayedRows:
        """What a correction sees of the rows at the places `index`; `logps` and `mask` are theirs, `(R, C)`."""
        proximal = [row.keep_proximal(now) for row, now in zip(stored, logps, strict=True)]
        padded = pad_sequence([row.logps for row in stored], batch_first=True)
        missing = logps.size(1) - padded.size(1)
        if missing:  # without, it would copy all the same
            padded = functional.pad(padded, (0, missing))
        padded = padded.to(logps.device, torch.float32)
        advantages = micro["advantages"][index]
        if advantages.dim() == 2:  # the trainer's loss adds a part of its own for each token
            advantages = torch.stack([row.advantage for row in stored]).to(advantages)
        ages = [row.age for row in stored]
        priorities = [row.priority for row in stored]
        return ReplayedRows(
            logps=logps,
            behavior_logps=torch.where(mask, padded, logps.float()),
            proximal_logps=torch.stack(proximal),
            mask=mask,
            advantages=advantages,
            ages=torch.tensor(ages, device=logps.device),
            priorities=torch.tensor(priorities, device=logps.device, dtype=torch.float32),
        )

    def _mask_rows(self, micro: MicroBatch, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Takes rows, `(b,)` bool, out of the policy and the KL term, in value and gradient."""
        advantages = micro["advantages"]
        tokens = rows.unsqueeze(1)
        masked = rows if advantages.dim() == 1 else tokens
        micro["advantages"] = advantages.masked_fill(masked, 0.0)
        mask = loss_mask(micro).bool() & ~tokens
        for key in (OLD_LOGPS, REF_LOGPS):
            value = dict.get(micro, key)
            if value is not None:
                micro[key] = torch.where(mask, value, logps.to(value.dtype))

    def _weighted(
        self, advantages: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, width: int
    ) -> torch.Tensor:
        """A copy of `advantages`, which are `(B,)` or `(B, C)`, with the weights of the rows `index` folded in."""
        if weights.dim() == 2:
            if not self._token_weights:
                raise ResultError(
                    "The correction gives token weights, which are exact only with importance_sampling_level='token'. "
                    "Use a correction with one weight a row, or set importance_sampling_level='token'."
                )
            if advantages.dim() == 1:
                advantages = advantages.unsqueeze(1).expand(-1, width)
        elif advantages.dim() == 2:
            weights = weights.unsqueeze(1)
        weighted = advantages.clone()
        weighted[index] = weighted[index] * weights.to(weighted)
        return weighted


def _placed_rows(placed: Placement) -> list[PlacedRow]:
    """The replayed rows of a placement that lie on this process."""
    tensors = placed.group.tensors
    lengths = placed.group.completion_lengths.tolist()
    logps = torch.split(tensors[OLD_LOGPS].float(), lengths)
    advantages = tensors["advantages"][placed.part]
    rows = []
    for index, row_logps in enumerate(logps[placed.part]):
        row = PlacedRow(
            logps=row_logps,
            age=placed.age,
            advantage=advantages[index],
            priority=placed.priority,
            position=placed.start + index,
        )
        rows.append(row)
    return rows


def _with_rows(values: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, `(b, C)`, with `rows`, `(R, C)`, at the places `index`."""
    copy = values.clone()
    copy[index] = rows.to(copy.dtype)
    return copy
