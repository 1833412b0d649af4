"""The behavior log-prob tap: records and supplies log-probs inside the training loss, without a forward of its own.

Where TRL leaves `old_per_token_logps` out of the batch, each fresh row's first training forward happens before the
optimizer moves, so that this forward's log-probs are those of the policy that generated the row. The tap keeps those
of candidates. For replayed rows it puts the stored ones, as the correction decides, into a shallow copy of the
micro-batch before the loss reads them. Rows that shall train nothing lose their advantage, KL and entropy gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.progress import KeptErrors
from ..batch.candidates import Candidate
from ..batch.compose import loss_mask
from ..compat import REF_LOGPS, LossForm, chooses_by_entropy, leave_out_of_entropy_control
from ..data.types import Batch, Placement
from .denominator import Denominator
from .fresh_stats import FreshStats
from .handshake import Handshake
from .micro_batch import COMPOSED, ROWS, SILENT, WITHOUT_KL, MicroBatch
from .supply import Placed, Supply


@dataclass(frozen=True, slots=True)
class Expected:
    """Everything that the tap knows of one composed batch: see [`Tap.expect_again`]."""

    placed: Placed
    denominator: Denominator


class Tap:
    """Wraps one trainer's loss and log-prob method.

    Args:
        supply ([`Supply`]): What replayed rows get.
        num_generations (`int`): Rows of a group.
        handshake ([`Handshake`]): Is shown what every loss has done.
        errors ([`KeptErrors`]): Where errors go that other processes have not heard of.
        form ([`LossForm`]): How the loss makes ratios.
        trainer (`Callable`): Gives the trainer, whose entropy control goes by fresh rows alone.

    Attributes:
        fresh ([`FreshStats`]): What the loss computes of fresh rows.
    """

    def __init__(
        self,
        supply: Supply,
        num_generations: int,
        handshake: Handshake,
        errors: KeptErrors,
        form: LossForm,
        trainer: Callable[[], Any],
    ) -> None:
        self.supply = supply
        self._generations = num_generations
        self.handshake = handshake
        self._errors = errors
        self._trainer = trainer
        self._current: MicroBatch | None = None
        self._candidates: dict[int, Candidate] = {}
        self._denominator = Denominator()
        self.fresh = FreshStats(form)

    def expect(
        self,
        flags: torch.Tensor,
        candidates: Sequence[Candidate],
        placements: Sequence[Placement],
        denominator: Denominator,
        advantages: torch.Tensor,
    ) -> torch.Tensor:
        """The id tensor of a generation batch, whose candidates are recorded and whose replayed rows are supplied.

        Args:
            flags (`(B,)` int64): The second column of `ROWS`.
            candidates (`Sequence[Candidate]`): Those with local rows that lack log-probs.
            placements (`Sequence[Placement]`): What was replayed here.
            denominator ([`Denominator`]): Of the loss.
            advantages (`(B,)`, `(B, 1)`, or `(B, C)`): Of the composed batch.

        Returns:
            `(B, 2)` int64, see `ROWS`.
        """
        ids = torch.stack([torch.zeros_like(flags), flags], dim=1)
        self._denominator = denominator
        self._candidates = {candidate.serial: candidate for candidate in candidates}
        for candidate in candidates:
            count = candidate.rows.stop - candidate.rows.start
            candidate.records = [None] * count
            first = 1 + candidate.serial * self._generations
            ids[candidate.rows, 0] = torch.arange(first, first + count)
        self.supply.place(placements, ids[:, 0], advantages)
        return ids

    @property
    def expected(self) -> Expected:
        """The batch at hand, to be trained on again after another one."""
        return Expected(self.supply.placed, self._denominator)

    def expect_again(self, expected: Expected) -> None:
        """Expect the micro-batches of an earlier batch again. Its candidates have settled: nothing is recorded."""
        self.supply.place_again(expected.placed)
        self._denominator = expected.denominator
        self._candidates = {}

    def loss(self, stock: Callable[[Batch], torch.Tensor], inputs: Batch, hands_out: bool = True) -> torch.Tensor:
        """Run the stock loss on a shallow copy of `inputs`, with the tap open.

        Args:
            stock (`Callable`): The loss.
            inputs (`dict`): A micro-batch.
            hands_out (`bool`): Whether the loss gets tensors that show in its own copies, too, what the tap writes.

        Raises:
            SeamError: The loss did not call the log-prob method with gradients, or did not use after it what the tap
                has written.
        """
        if ROWS not in inputs:
            return stock(inputs)
        self._current = micro = MicroBatch(inputs, hands_out)
        try:
            loss = stock(micro)
        finally:
            self._current = None
        self.handshake.check(micro)
        scale = self.scale(micro)
        return loss if scale is None else loss * scale

    def scale(self, micro: MicroBatch) -> torch.Tensor | float | None:
        """Factor on a micro-batch's loss; None if there is none."""
        return self._denominator.scale(micro)

    def logps(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Look at what the wrapped log-prob method returned, log-probs `(b, C)`, entropies `(b, C)` and more, once
        in each training loss.

        Returns:
            The same, but for rows and tokens that train nothing, whose entropies lose their gradient.
        """
        micro = self._current
        if micro is None or micro.tapped or not result[0].requires_grad:
            return result
        micro.tapped = True
        logps = result[0].detach()
        self._record(micro.ids.tolist(), logps)
        self._drop_kl(micro, logps)
        self._note_fresh(micro, result)
        masked: torch.Tensor | None = None  # (b, C) or (b, 1) bool
        if bool((micro.flags & COMPOSED).any()):
            masked = self._supply_or_mask(micro, logps)
        dead = (micro.flags & SILENT).bool()
        if bool(dead.any()):
            dead = dead.to(logps.device)
            micro.silence(dead, logps)
            silent = dead.unsqueeze(1)
            masked = silent if masked is None else masked | silent
        micro.complete(logps)
        return self._denominator.returned(result, micro, masked, self.scale(micro))

    def high_entropy(self, chosen: torch.Tensor) -> torch.Tensor:
        """Look at the tokens, `(b, C)` bool, that `top_entropy_quantile` lets a loss train on. Returns the same."""
        micro = self._current
        if micro is not None and micro.entropies is not None:
            micro.high_entropy = chosen
            self._control_entropy(micro, micro.entropies, loss_mask(micro) * chosen)
        return chosen

    def _drop_kl(self, micro: MicroBatch, logps: torch.Tensor) -> None:
        """Take rows out of the KL term: the divergence of the policy from itself is 0, in value and gradient."""
        rows = (micro.flags & WITHOUT_KL).bool()
        if bool(rows.any()):
            micro.keep(REF_LOGPS, ~rows.to(logps.device).unsqueeze(1), logps)

    def forget(self) -> None:
        """Record nothing more of the present generation batch, as after an update; what is recorded already stays."""
        self._candidates = {}

    def _record(self, ids: list[int], logps: torch.Tensor) -> None:
        places = [divmod(row - 1, self._generations) for row in ids]
        ours = [position for position, (serial, _) in enumerate(places) if serial in self._candidates]
        if not ours:
            return
        kept = logps[ours]  # a copy: a view would keep the other rows until the next generation batch
        for position, row_logps in zip(ours, kept, strict=True):
            serial, index = places[position]
            candidate = self._candidates.get(serial)
            if candidate is not None and candidate.record(index, row_logps):
                del self._candidates[serial]  # a row may come again before the update: its first forward counts

    def _note_fresh(self, micro: MicroBatch, result: tuple[Any, ...]) -> None:
        """Keep apart what the loss computes of fresh rows, before anything is changed for replayed ones."""
        logps = result[0].detach()
        others = [value for value in result[1:] if torch.is_tensor(value)]
        entropies = next((value for value in others if value.shape == logps.shape), None)
        mask = loss_mask(micro)
        replayed = micro.replayed.to(logps.device)
        fresh = mask.bool() & ~replayed.unsqueeze(1)
        self.fresh.add(micro, logps, entropies, fresh)
        if entropies is None:
            return
        if chooses_by_entropy(self._trainer()):
            micro.entropies = entropies.detach()
        else:
            self._control_entropy(micro, entropies.detach(), mask)

    def _control_entropy(self, micro: MicroBatch, entropies: torch.Tensor, mask: torch.Tensor) -> None:
        leave_out_of_entropy_control(self._trainer(), entropies, mask, micro.replayed.to(mask.device))

    def _supply_or_mask(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor | None:
        """[`Supply.put_into`]; on several processes an error is kept until all can raise it, and replayed rows train
        nothing."""
        try:
            return self.supply.put_into(micro, logps)
        except Exception as error:
            self._errors.keep(error)
            micro.silence(micro.replayed.to(logps.device), logps)
            return None
