"""Supplies the loss for replayed rows: their stored log-probs, as the correction decides, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ..base.progress import Check, check_at_once
from ..base.transfer import send
from ..compat import OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS
from ..data.fields import ADVANTAGES
from ..data.types import Corrected, Ints, Placement, ReplayedRows
from ..errors import ResultError, SeamError
from .bounds import Bounds
from .micro_batch import SILENT, MicroBatch
from .stats import OffPolicyStats


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
        self, correct: Callable[[ReplayedRows], Corrected], bounds: Bounds, token_weights: bool, check: Check
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
        if block is logps and all(row[0] is block and row[1] == place for place, row in enumerate(rows)):
            return block
        return torch.stack([_as_wide(rows_of[place : place + 1], width)[0] for rows_of, place in rows])


def _as_wide(values: torch.Tensor, width: int) -> torch.Tensor:
    """`(R, width)`: values with 0 where there are none, or without the last, as wide as what the loss reads: an
    override may trim it."""
    missing = width - values.size(1)
    return functional.pad(values, (0, missing)) if missing else values


def fitting(rows: ReplayedRows, corrected: Corrected, token_weights: bool, check: Check = check_at_once) -> Corrected:
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
