"""Supplies the loss for replayed rows: their stored log-probs, as the correction decides, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..compat import OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS
from ..data.fields import ADVANTAGES
from ..data.types import Corrected, Placement, ReplayedRows
from ..errors import ResultError, SeamError
from .bounds import Bounds
from .micro_batch import SILENT, MicroBatch, PlacedRow
from .off_policy_stats import OffPolicyStats


@dataclass(frozen=True, slots=True)
class Placed:
    """The replayed rows of one batch of this process, and the number of the first: see [`Supply.place_again`]."""

    rows: list[PlacedRow]
    first: int


class Supply:
    """The replayed rows of one generation batch.

    Args:
        correct (`Callable`): What the correction decides for the replayed rows of a micro-batch.
        bounds ([`Bounds`]): On the reference's log-probs.
        token_weights (`bool`): Whether the correction may give one weight a token.

    Attributes:
        stats ([`OffPolicyStats`]): What was seen of them.
        placed ([`Placed`]): They themselves.
    """

    def __init__(self, correct: Callable[[ReplayedRows], Corrected], bounds: Bounds, token_weights: bool) -> None:
        self._correct = correct
        self._bounds = bounds
        self._token_weights = token_weights
        self.stats = OffPolicyStats()
        self.placed = Placed([], 0)

    def place(self, placements: Sequence[Placement], ids: torch.Tensor, advantages: torch.Tensor) -> None:
        """Begin a generation batch.

        Args:
            placements (`Sequence[Placement]`): What was replayed on this process.
            ids (`(B,)` int64): The first column of `ROWS`; gets the replayed rows' numbers.
            advantages (`(B,)`, `(B, 1)`, or `(B, C)`): Of the composed batch.
        """
        first = self.placed.first + len(self.placed.rows)
        rows: list[PlacedRow] = []
        for placed in placements:
            begin = first + len(rows)
            ids[placed.rows] = -1 - torch.arange(begin, begin + placed.count)
            rows += _placed_rows(placed, advantages[placed.rows])
        self.placed = Placed(rows, first)

    def place_again(self, placed: Placed) -> None:
        """Go back to an earlier batch."""
        self.placed = placed

    def put_into(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor:
        """Give a composed micro-batch the replayed rows' log-probs and weights, and the policy's own log-probs where
        the loss must not see stored ones.

        Stored values are padded with 0, which against a very unlikely pad token gives inf * 0 in the loss; so would
        the ratio of a row without weight that is far off. A token without weight among others keeps its ratio, which
        counts in its sequence's; its KL is that to the policy itself, 0 in value and gradient.

        Args:
            micro ([`MicroBatch`]): Changes.
            logps (`(b, C)`): The policy's, detached.

        Returns:
            `(b, C)` bool, the replayed tokens whose weight is 0.
        """
        mask = micro.mask.bool()
        weightless = torch.zeros_like(mask)
        if bool(micro.replayed.any()):
            weightless = self._replace(micro, logps, mask)
        silent = weightless.all(dim=1, keepdim=True)
        micro.keep(OLD_LOGPS, mask & ~silent, logps)
        micro.keep(REF_LOGPS, mask & ~weightless, logps)
        return weightless

    def _replace(self, micro: MicroBatch, logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ask the correction about the replayed rows, and do as it says; return the tokens without weight."""
        places = micro.replayed.nonzero().flatten()  # (R,)
        index = places.to(logps.device)
        stored = self._stored(micro.ids[places].tolist())
        trains = (micro.flags[places] & SILENT).eq(0).to(logps.device)
        trained = mask[index] & trains.unsqueeze(1)
        rows = _replayed_rows(stored, logps[index], trained, micro.peek(ADVANTAGES)[index])
        corrected = fitting(rows, self._correct(rows), self._token_weights)
        self.stats.add(rows, corrected.weights)
        weightless = torch.zeros_like(trained)
        if corrected.weights is not None:
            weightless |= corrected.weights.eq(0).view(len(stored), -1)
        if corrected.weights is not None or corrected.shift is not None:
            micro.write(ADVANTAGES, _signal(micro.peek(ADVANTAGES), index, corrected, logps.size(1)))
        self._write_logps(micro, index, logps, mask, rows, corrected.old_logps, weightless)
        return _with_rows(torch.zeros_like(mask), index, weightless)

    def _write_logps(
        self,
        micro: MicroBatch,
        index: torch.Tensor,
        logps: torch.Tensor,
        mask: torch.Tensor,
        rows: ReplayedRows,
        old_logps: torch.Tensor,
        weightless: torch.Tensor,
    ) -> None:
        """Write the old, sampling and reference log-probs of the rows `index`.

        Args:
            micro ([`MicroBatch`]): Changes.
            index (`(R,)` int64): The replayed rows.
            logps, mask (`(b, C)`): The policy's log-probs, and the tokens that the loss trains on.
            rows ([`ReplayedRows`]): The replayed rows.
            old_logps (`(R, C)`): What the correction decided.
            weightless (`(R, C)` bool): Their tokens without weight.
        """
        given = micro.peek(OLD_LOGPS)
        old = logps if given is None else given
        if micro.peek(SAMPLING_LOGPS) is None:  # TRL's off-policy mask would take the corrected old log-probs for them
            micro.write(SAMPLING_LOGPS, _with_rows(old, index, rows.behavior_logps))
            micro.keep(SAMPLING_LOGPS, mask, logps)
        micro.write(OLD_LOGPS, _with_rows(old, index, old_logps))
        self._bounds.note_clipping(rows, old_logps, rows.mask & ~weightless)
        reference = micro.peek(REF_LOGPS)
        if reference is not None:
            bounded = self._bounds.reference(rows, old_logps, reference[index], rows.mask & ~weightless)
            micro.write(REF_LOGPS, _with_rows(reference, index, bounded))

    def _stored(self, ids: Sequence[int]) -> list[PlacedRow]:
        rows, first = self.placed.rows, self.placed.first
        numbers = [-1 - row - first for row in ids]
        if not all(number in range(len(rows)) for number in numbers):
            raise SeamError(
                "A micro-batch holds replayed rows of an earlier generation batch, whose log-probs are gone. Train "
                "on each batch before the next one is generated."
            )
        return [rows[number] for number in numbers]


def fitting(rows: ReplayedRows, corrected: Corrected, token_weights: bool) -> Corrected:
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
    if bool((highest > lowest).any()):
        raise ResultError(
            "The correction gives token weights, which are exact only with importance_sampling_level='token'; one "
            "that goes by the sign of an advantage gives them to rows whose tokens have both. Use a correction "
            "with one weight a row, or set importance_sampling_level='token'."
        )
    return replace(corrected, weights=torch.where(counts.any(dim=1), highest, 1.0))


def _replayed_rows(
    stored: Sequence[PlacedRow], logps: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> ReplayedRows:
    """Return what a correction sees.

    Args:
        stored (`Sequence[PlacedRow]`): The `R` replayed rows of a micro-batch.
        logps, mask (`(R, C)`): The policy's log-probs, and the tokens that train.
        advantages (`(R,)` or `(R, C)`): Those of the micro-batch.
    """
    device = logps.device
    present = [now[: len(row.logps)] for row, now in zip(stored, logps, strict=True)]
    proximal = [row.keep_proximal(now) for row, now in zip(stored, present, strict=True)]
    is_first = all(kept is now for kept, now in zip(proximal, present, strict=True))
    padded = _padded([row.logps for row in stored], logps.size(1)).to(device, torch.float32)
    if advantages.dim() == 2:  # the batch's: the trainer's loss may have added a part of its own for each token
        advantages = _batch_advantages(stored, logps.size(1)).to(advantages)
    return ReplayedRows(
        logps=logps,
        behavior_logps=torch.where(mask, padded, logps.float()),
        proximal_logps=logps if is_first else torch.where(mask, _padded(proximal, logps.size(1)), logps),
        mask=mask,
        advantages=advantages,
        ages=torch.tensor([row.age for row in stored], device=device),
        priorities=torch.tensor([row.priority for row in stored], device=device, dtype=torch.float32),
    )


def _batch_advantages(stored: Sequence[PlacedRow], width: int) -> torch.Tensor:
    """`(R,)`, or `(R, C)` if those of any row are its tokens'."""
    advantages = [row.advantage for row in stored]
    if not any(advantage.dim() for advantage in advantages):
        return torch.stack(advantages)
    spread = [advantage.expand(len(row.logps)) for advantage, row in zip(advantages, stored, strict=True)]
    return _padded(spread, width)


def _padded(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """`(R, width)` of rows of any lengths, as wide as what the loss reads: an override may trim it."""
    padded = pad_sequence(list(rows), batch_first=True)
    missing = width - padded.size(1)
    return functional.pad(padded, (0, missing)) if missing else padded  # without, it would copy all the same


def _placed_rows(placed: Placement, advantages: torch.Tensor) -> list[PlacedRow]:
    """The replayed rows of a placement that lie on this process, with these advantages, `(n,)`, `(n, 1)`, or
    `(n, C)`."""
    tensors = placed.group.tensors
    lengths = placed.group.completion_lengths.tolist()
    logps = torch.split(tensors[OLD_LOGPS].float(), lengths)
    rows = []
    for row_logps, advantage in zip(logps[placed.part], advantages, strict=True):
        own = advantage[: len(row_logps)] if advantage.numel() > 1 else advantage.reshape(())
        rows.append(PlacedRow(logps=row_logps, age=placed.age, advantage=own, priority=placed.priority))
    return rows


def _signal(advantages: torch.Tensor, index: torch.Tensor, corrected: Corrected, width: int) -> torch.Tensor:
    """`advantages`, `(B,)`, `(B, 1)` or `(B, C)`, with what a correction adds to the rows `index` and multiplies them
    by."""
    weights, shift = corrected.weights, corrected.shift
    if weights is not None and weights.dim() == 2 and (advantages.dim() == 1 or advantages.size(1) != width):
        advantages = advantages.view(len(advantages), 1).expand(-1, width)
    signal = advantages[index]
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
    copy = values.clone()
    copy[index] = rows.to(copy.dtype)
    return copy
