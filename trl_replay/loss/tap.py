"""The behavior log-prob tap: records and supplies log-probs inside the training loss, without a forward of its own.

Where TRL leaves `old_per_token_logps` out of the batch, each fresh row's first training forward happens before the
optimizer moves, so that this forward's log-probs are those of the policy that generated the row. The tap keeps those
of candidates. For replayed rows it puts the stored ones, as the correction decides, into a shallow copy of the mapping
that the loss reads, once the loss has its log-probs and before it reads anything else. Rows that shall train nothing
lose their advantage, KL and entropy gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..base.progress import KeptErrors
from ..base.transfer import send
from ..batch.candidates import Block, Candidate, Recorded
from ..compat import LOSS, OLD_LOGPS, REF_LOGPS, LossForm, chooses_by_entropy, leave_out_of_entropy_control
from ..data.fields import ADVANTAGES
from ..data.types import Ints, Placement
from ..errors import SeamError
from .inserted import Handshake, LossClasses
from .micro_batch import COMPOSED, ROWS, SILENT, WITHOUT_KL, Denominator, MicroBatch, ReadNotes
from .stats import FreshStats
from .supply import Placed, Supply

PROMPTS, COMPLETIONS = "prompt_ids", "completion_ids"


@dataclass(frozen=True, slots=True)
class Given:
    """A micro-batch as the whole loss was given it: its row ids, here on the CPU, and its completions."""

    rows: torch.Tensor
    on_cpu: torch.Tensor
    completions: torch.Tensor


@dataclass(frozen=True, slots=True)
class TapState:
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
        classes ([`LossClasses`]): Have the trainer's loss go through `part`.
        reading ([`MicroBatch`], *optional*): What the loss reads at the moment.
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
        self._given: Given | None = None
        self._parts: list[MicroBatch] = []
        self._model: Any = None
        self._checked = False  # whether a loss that is not TRL's was seen to use what the tap writes
        self.reading: MicroBatch | None = None
        self.classes = LossClasses(self.part)
        self._candidates: dict[int, Candidate] = {}
        self._denominator = Denominator()
        self._flagged = False  # whether rows of the batch train something else than in stock
        self.fresh = FreshStats(form)

    def expect(
        self,
        flags: Ints,
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
        ids = np.zeros((len(flags), 2), np.int64)
        ids[:, 1] = flags
        self._denominator = denominator
        self._flagged = bool((flags & ~COMPOSED).any())
        self._candidates = {candidate.serial: candidate for candidate in candidates}
        for candidate in candidates:
            count = candidate.rows.stop - candidate.rows.start
            candidate.records = [None] * count
            first = 1 + candidate.serial * self._generations
            ids[candidate.rows, 0] = range(first, first + count)
        self.supply.place(placements, ids[:, 0], advantages)
        return torch.from_numpy(ids)

    @property
    def expected(self) -> TapState:
        """The batch at hand, to be trained on again after another one."""
        return TapState(self.supply.placed, self._denominator)

    def expect_again(self, expected: TapState) -> None:
        """Expect the micro-batches of an earlier batch again. Its candidates have settled: nothing is recorded."""
        self.supply.place_again(expected.placed)
        self._denominator = expected.denominator
        self._candidates = {}

    def expect_nothing(self) -> None:
        """Expect a generation batch that replay left as it was."""
        self._candidates, self._flagged = {}, False
        self.supply.place([], np.empty(0, np.int64), torch.empty(0))

    def opens(self, inputs: Any, training: bool) -> bool:
        """Tell whether a loss is to go through `loss`: on a batch with row ids, and not within another one.

        Raises:
            SeamError: The batch has lost its row ids: in the first loss on it, or where rows do not train as in stock.
        """
        if self._given is not None or ROWS in inputs:
            return self._given is None
        if training and (self.handshake.awaited or self._flagged or self.supply.placed.lengths):
            raise SeamError(
                f"A micro-batch has lost {ROWS!r}, which tells replayed rows from fresh ones: where compute_loss "
                "makes a batch of its own, take this key along, or train without replay: use_replay=False."
            )
        return False

    def loss(self, whole: Callable[[Any], torch.Tensor], inputs: Any, has_overrides: bool = False) -> torch.Tensor:
        """Run the trainer's training loss with the tap open.

        Args:
            whole (`Callable`): The loss, overrides included, which calls `part`.
            inputs (`Mapping`): A micro-batch.
            has_overrides (`bool`): Whether some may stand around it that are a user's.

        Raises:
            SeamError: No part of the loss asked for log-probs and then read what the tap writes.
        """
        rows = inputs[ROWS]
        # an override may index all that the batch holds by rows there
        on_device = send({0: rows}, inputs[COMPLETIONS].device)[0]
        self._given = Given(on_device, rows, inputs[COMPLETIONS])
        inputs[ROWS] = on_device
        watched = inputs
        if has_overrides and OLD_LOGPS not in inputs and bool((rows[:, 0] < 0).any()):
            watched = ReadNotes(inputs)
        try:
            loss = whole(watched)
            self.handshake.check(self._parts, could_train=bool(self._parts) or bool(inputs[ADVANTAGES].any()))
            if watched is not inputs:
                self.classes.check_overrides(type(self._trainer()), watched.read)
            return loss
        except Exception:
            self.handshake.awaited = False  # as where memory runs out, and training_step goes on
            raise
        finally:
            inputs.update(watched)
            self._parts, self._given = [], None
            if inputs.get(ROWS) is on_device:
                inputs[ROWS] = rows

    def part(self, make: Callable[[Any], torch.Tensor], model: Any, inputs: Any, is_stock: bool) -> torch.Tensor:
        """Run one call of the loss that calls no other, on a mapping that the tap may write to.

        Args:
            make (`Callable`): That loss.
            model: What it was given.
            inputs (`Mapping`): The same: the exact mapping that it would read.
            is_stock (`bool`): Whether it is TRL's, which makes one forward and reads the rest after it.
        """
        if self._given is None or self.reading is not None:
            return make(inputs)
        rows = self._rows(self._given, inputs)
        self.reading = micro = MicroBatch(inputs, rows, self._given.rows if rows is self._given.on_cpu else None)
        batch = inputs
        trains_otherwise = bool(micro.replayed) or micro.has(-1)
        if not is_stock and (trains_otherwise or not self._checked):
            batch = ReadNotes(inputs)
        elif trains_otherwise:
            batch = dict(inputs)
        micro.batch = batch
        self._model = None if is_stock else model
        try:
            loss = make(batch)
        finally:
            self.reading = self._model = None
        if micro.tapped and isinstance(batch, ReadNotes):
            self.handshake.check_own(micro, batch.read, loss)
            self._checked = True
        if not is_stock:
            micro.give_back()
        if not micro.tapped:
            return loss
        self._parts.append(micro)
        scale = self.scale(micro)
        return loss if scale is None else loss * scale

    def scale(self, micro: MicroBatch) -> torch.Tensor | float | None:
        """Factor on a part of the loss; None if there is none."""
        return self._denominator.scale(micro)

    def asks(self, model: Any, ids: torch.Tensor) -> MicroBatch | None:
        """Tell whether a call of the log-prob method is the one of the loss at hand.

        Args:
            model: What is asked.
            ids (`(b, P + C)`): Prompts and completions.

        Returns:
            Its micro-batch. TRL's loss makes one such call; another loss's is the first with its model and tokens.
        """
        micro = self.reading
        if micro is None or micro.asked or not torch.is_grad_enabled():
            return None
        if self._model is not None:
            prompts, completions = micro.peek(PROMPTS), micro.peek(COMPLETIONS)
            width = prompts.size(1)
            same = torch.equal(ids[:, :width], prompts) and torch.equal(ids[:, width:], completions)
            if model is not self._model or not same:
                return None
        micro.asked = True
        return micro

    def logps(self, micro: MicroBatch, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Look at what the log-prob method returned to the loss, log-probs `(b, C)`, entropies `(b, C)` and more, and
        write what it shall read.

        Returns:
            The same, but for rows and tokens that train nothing, whose entropies lose their gradient.
        """
        if not result[0].requires_grad:
            micro.asked = False
            return result
        micro.tapped = True
        read = micro.batch.read.copy() if isinstance(micro.batch, ReadNotes) else set()
        logps = result[0].detach()
        self._record(micro.ids, logps)
        self._drop_kl(micro, logps)
        self._note_fresh(micro, result)
        masked: torch.Tensor | None = None  # (b, C) or (b, 1) bool
        if micro.has(COMPOSED):
            masked = self._supply_or_mask(micro, logps)
        if micro.has(SILENT):
            dead = micro.marked(SILENT)
            micro.silence(dead, logps)
            silent = dead.unsqueeze(1)
            masked = silent if masked is None else masked | silent
        if isinstance(micro.batch, ReadNotes):
            if ADVANTAGES in read:
                micro.probe = torch.ones((), device=logps.device, requires_grad=True)
                micro.write(ADVANTAGES, micro.peek(ADVANTAGES) * micro.probe)
            micro.batch.read.clear()
        return self._denominator.returned(result, micro, masked, self.scale(micro))

    @staticmethod
    def _rows(given: Given, batch: Any) -> torch.Tensor:
        """The row ids of what the inner loss was given, `(b, 2)` on the CPU: those of the whole loss where it has none
        of its own and the same completions.

        Raises:
            SeamError: Its rows are others.
        """
        rows, own = batch.get(ROWS, given.rows), batch[COMPLETIONS]
        if rows is not given.rows and len(rows) == len(own):
            return cast("torch.Tensor", rows.cpu())
        width = min(own.size(1), given.completions.size(1))
        if own is given.completions or (
            rows is given.rows
            and len(own) == len(rows)
            and torch.equal(own[:, :width], given.completions[:, :width].to(own.device))
        ):
            return given.on_cpu
        raise SeamError(
            f"{LOSS} was given other rows than its batch has, or in another order, and not the same of {ROWS!r}: do "
            "the same with this key as with the others, or train without replay: use_replay=False."
        )

    def high_entropy(self, chosen: torch.Tensor) -> torch.Tensor:
        """Look at the tokens, `(b, C)` bool, that `top_entropy_quantile` lets a loss train on. Returns the same."""
        micro = self.reading
        if micro is not None and micro.entropies is not None:
            micro.high_entropy = chosen
            self._control_entropy(micro, micro.entropies, micro.mask * chosen)
        return chosen

    def _drop_kl(self, micro: MicroBatch, logps: torch.Tensor) -> None:
        """Take rows out of the KL term: the divergence of the policy from itself is 0, in value and gradient."""
        if micro.has(WITHOUT_KL):
            micro.keep(REF_LOGPS, ~micro.marked(WITHOUT_KL).unsqueeze(1), logps)

    def forget(self) -> None:
        """Record nothing more of the present generation batch, as after an update; what is recorded already stays."""
        self._candidates = {}

    def _record(self, ids: list[int], logps: torch.Tensor) -> None:
        block: Block | None = None
        for place, row in enumerate(ids):
            serial, index = divmod(row - 1, self._generations)
            if row <= 0 or serial not in self._candidates:
                continue
            if block is None:
                block = Block(logps if logps.is_cuda else logps.clone())  # the loss might change its own
            records = self._candidates[serial].records
            if records[index] is None:  # a row may come again before the update: its first forward counts
                records[index] = Recorded(block, place)

    def _note_fresh(self, micro: MicroBatch, result: tuple[Any, ...]) -> None:
        """Keep apart what the loss computes of fresh rows, before anything is changed for replayed ones."""
        logps = result[0].detach()
        others = [value for value in result[1:] if torch.is_tensor(value)]
        entropies = next((value for value in others if value.shape == logps.shape), None)
        mask = micro.mask
        fresh = mask.bool()
        if micro.replayed:
            fresh = fresh & ~micro.are_replayed.unsqueeze(1)
        self.fresh.add(micro, logps, entropies, fresh)
        if entropies is None:
            return
        if chooses_by_entropy(self._trainer()):
            micro.entropies = entropies.detach()
        else:
            self._control_entropy(micro, entropies.detach(), mask)

    def _control_entropy(self, micro: MicroBatch, entropies: torch.Tensor, mask: torch.Tensor) -> None:
        if micro.replayed:
            leave_out_of_entropy_control(self._trainer(), entropies, mask, micro.are_replayed)

    def _supply_or_mask(self, micro: MicroBatch, logps: torch.Tensor) -> torch.Tensor | None:
        """Supply log-probs. On several processes an error is kept for the next message, and replayed rows get no
        gradient."""
        try:
            return self.supply.put_into(micro, logps)
        except Exception as error:
            self._errors.keep(error)
            micro.silence(micro.are_replayed, logps)
            return None
