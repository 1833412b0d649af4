"""The behavior log-prob tap: records and supplies log-probs inside the training loss, without a forward of its own.

Where TRL leaves `old_per_token_logps` out of the batch, each fresh row's first training forward happens before the
optimizer moves, so that this forward's log-probs are those of the policy that generated the row. The tap keeps those
of candidates. For replayed rows it puts the stored ones, as the correction decides, into a shallow copy of the mapping
that the loss reads, once the loss has its log-probs and before it reads anything else. Rows that shall train nothing
lose their advantage, KL and entropy gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

import numpy as np
import torch

from ..base.progress import KeptErrors, send
from ..batch.groups import Block, Candidate, Recorded
from ..compat import (
    HIGH_ENTROPY,
    LOGPS,
    LOSS,
    OLD_LOGPS,
    REF_LOGPS,
    LossForm,
    chooses_by_entropy,
    is_stock_loss,
    leave_out_of_entropy_control,
)
from ..data.types import ADVANTAGES, Ints, Placement
from ..errors import ContractError, SeamError
from .supply import COMPOSED, ROWS, SILENT, WITHOUT_KL, Denominator, FreshStats, MicroBatch, Placed, ReadNotes, Supply

WHOLE = "compute_loss"
"""Transformers' method, which TRL's trainer has call `LOSS`."""
Around = Callable[[Callable[[Any], Any], Any, Any, bool], Any]
"""Called as `around(make, model, inputs, is_stock)` in the place of `make(inputs)`, the loss that calls no other."""


class LossClasses:
    """Makes and keeps the classes of one trainer.

    Args:
        around (`Callable`): Stands in front of the loss: `Around`.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._made: dict[tuple[Any, ...], type] = {}
        self._named_around: dict[tuple[Any, ...], set[str]] = {}

    def check(self, trainer: Any) -> None:
        """Make the class, and try it on the trainer.

        Raises:
            ContractError: Its own class allows no such subclass, or makes its loss elsewhere.
        """
        for base in _own(type(trainer), WHOLE):
            names = _names(vars(base)[WHOLE])
            if LOGPS in names and not {WHOLE, LOSS} & names:
                raise ContractError(
                    f"{base.__name__} can't be attached to: it makes its whole loss in {WHOLE}, where replay has no "
                    f"part. Name it {LOSS}(self, model, inputs), which {WHOLE} calls, or train without replay: "
                    "use_replay=False."
                )
        try:
            with self.inserted(trainer):
                pass
        except Exception as error:
            raise ContractError(
                f"{type(trainer).__name__} can't be attached to: no subclass of it can be made, which replay puts in "
                f"front of its loss while that runs ({type(error).__name__}: {error}). Let its metaclass and "
                "__init_subclass__ allow one without arguments, or train without replay: use_replay=False."
            ) from error

    @contextmanager
    def inserted(self, trainer: Any) -> Iterator[None]:
        """Put our class in front of the one that makes the loss, on this trainer alone."""
        before = type(trainer)
        object.__setattr__(trainer, "__class__", self._of(before))
        try:
            yield
        except RecursionError as error:
            raise SeamError(
                f"{LOSS} called itself without end. While it runs, a trainer's type is a subclass of its class, so "
                "that super(type(self), self) is the loss itself: write super(), or train without replay: "
                "use_replay=False."
            ) from error
        finally:
            object.__setattr__(trainer, "__class__", before)

    def check_overrides(self, trainer_class: type, read: Collection[str]) -> None:
        """Look for a term of an override's own in a loss with replayed rows whose batch has no old log-probs.

        Args:
            trainer_class (`type`): The trainer's.
            read (`Collection[str]`): Keys of the batch that were read around the loss that calls no other.

        Raises:
            SeamError: The override asks for old log-probs.
        """
        key = trainer_class, *(vars(base).get(name) for base in trainer_class.__mro__ for name in (LOSS, WHOLE))
        if key not in self._named_around:
            self._named_around[key] = _named_around(trainer_class)
        if OLD_LOGPS in self._named_around[key] or OLD_LOGPS in read:
            maker = loss_maker(trainer_class)
            raise SeamError(
                f"A loss around {maker.__name__}.{LOSS} reads {OLD_LOGPS!r}, which its batch does not have: a term of "
                "its own would train replayed rows as if they were on-policy. Set num_iterations=2, by which TRL's "
                f"batch has them, put the term into the loss itself (one {LOSS} that calls no other), or train "
                "without replay: use_replay=False."
            )

    def _of(self, trainer_class: type) -> type:
        """The class for a trainer's class, made anew where a loss was patched since."""
        key = trainer_class, *(vars(base).get(LOSS) for base in trainer_class.__mro__)
        if key not in self._made:
            self._made[key] = _with_ours(trainer_class, self._around)
        return self._made[key]


def _with_ours(before: type, around: Around) -> type:
    """What takes the place of a trainer's class."""
    maker = loss_maker(before)
    is_stock = is_stock_loss(vars(maker)[LOSS])

    def loss(self: Any, model: Any, inputs: Any) -> Any:
        return around(lambda batch: getattr(super(ours, self), LOSS)(model, batch), model, inputs, is_stock)

    ours: Any = _subclass(maker, (maker,), {LOSS: loss})
    return ours if maker is before else _subclass(before, (before, ours), {})


def _subclass(named: type, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """A class that prints as `named`."""
    names = {"__module__": named.__module__, "__qualname__": named.__qualname__}
    return type(named)(named.__name__, bases, {**body, **names})


def _own(trainer_class: type, name: str) -> list[type]:
    """The classes that override one of TRL's methods."""
    defining = [base for base in trainer_class.__mro__ if name in vars(base)]
    return [base for base in defining if _is_users(base)]


def loss_maker(trainer_class: type) -> type:
    """The class that makes the loss: TRL's, or that of an override that asks for log-probs and calls no other loss."""
    defining = [base for base in trainer_class.__mro__ if LOSS in vars(base)]
    names = {base: _names(vars(base)[LOSS]) for base in defining}
    return next((base for base in defining if LOGPS in names[base] and LOSS not in names[base]), defining[-1])


def _named_around(trainer_class: type) -> set[str]:
    """What the overrides name that stand around the loss that calls no other. What those of `WHOLE` read is not seen:
    users' functions, methods, and texts that they name count, too, and what these name in turn."""
    maker = loss_maker(trainer_class)
    around = [base for base in _own(trainer_class, LOSS) if issubclass(base, maker) and base != maker]
    named = set[str]().union(*(_names(vars(base)[LOSS]) for base in around))
    due: list[Any] = [vars(base)[WHOLE] for base in _own(trainer_class, WHOLE)]
    seen = [vars(maker)[LOSS]]
    while due:
        one = inspect.unwrap(due.pop())
        if isinstance(one, str):
            named.add(one)
        elif isinstance(one, FunctionType) and one not in seen and _is_users(one):
            seen.append(one)
            names = _names(one)
            named |= names
            held = [cell.cell_contents for cell in one.__closure__ or ()]
            held += [one.__globals__.get(name) for name in names]
            held += [inspect.getattr_static(trainer_class, name, None) for name in names]
            due += [getattr(each, "__func__", each) for each in held]  # of a static method
    return named


def _is_users(made: Any) -> bool:
    """Tell whether a class or function is a user's."""
    return str(made.__module__).partition(".")[0] not in ("trl", "transformers", "torch", "trl_replay")


def _names(function: Any, seen: frozenset[Any] = frozenset()) -> set[str]:
    """What a function's code names, functions that it wraps or encloses included."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return set()
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return _in_code(function.__code__).union(*(_names(one, seen | {function}) for one in enclosed))


def _in_code(code: CodeType) -> set[str]:
    names = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
    return names.union(*(_in_code(value) for value in code.co_consts if isinstance(value, CodeType)))


REMEDY = " Call the trainer's own loss with super() in an override, or train without replay: use_replay=False."


class Handshake:
    """Watches one trainer's losses.

    Attributes:
        verified (`bool`): Whether a loss has been served what replay changes for it.
        awaited (`bool`): Whether candidates were collected, and no loss has done so since.
    """

    def __init__(self) -> None:
        self.verified = False
        self.awaited = False

    def check(self, served: Sequence[MicroBatch], could_train: bool) -> None:
        """Look at what the tap has served in a loss.

        Args:
            served (`Sequence[MicroBatch]`): The calls of the inner loss that asked for log-probs.
            could_train (`bool`): Whether any of its rows has an advantage: without, a loss may skip the micro-batch.

        Raises:
            SeamError: It served nothing, or the loss did not choose tokens for the entropy bonus.
        """
        if not served and could_train:
            raise SeamError(
                f"{LOSS} never called {LOGPS} with gradients on its batch: replayed rows would train with a ratio of "
                f"1. Call the loss with super().{LOSS}(model, inputs), not by its class's name; in a loss of your "
                f"own, call self.{LOGPS} in {LOSS} itself, with its model and its prompts and completions; or train "
                "without replay: use_replay=False."
            )
        if any(micro.entropies is not None and micro.high_entropy is None for micro in served):
            raise SeamError(
                f"{LOSS} never called {HIGH_ENTROPY} after {LOGPS}: the entropy bonus would go by other rows than the "
                "loss." + REMEDY
            )
        self.verified = self.verified or bool(served)
        self.awaited = False

    @staticmethod
    def check_own(micro: MicroBatch, read: Collection[str], loss: torch.Tensor) -> None:
        """Look at how a loss that is not TRL's has used what the tap writes.

        Args:
            micro ([`MicroBatch`]): What it was given.
            read (`Collection[str]`): Keys that it has read since the tap has written.
            loss (`()`): What it returned.

        Raises:
            SeamError: It did not read it after the log-probs, or its advantages have no part in its gradient.
        """
        keys = (OLD_LOGPS, ADVANTAGES, *([] if micro.peek(REF_LOGPS) is None else [REF_LOGPS]))
        lost = [key for key in keys if key not in read]
        if micro.probe is not None and ADVANTAGES not in lost:
            (gradient,) = torch.autograd.grad(loss, micro.probe, retain_graph=True, allow_unused=True)
            lost += [ADVANTAGES] if gradient is None else []
        if lost:
            raise SeamError(
                f"{LOSS} did not use {lost[0]!r} after {LOGPS}: replayed rows would train without their correction. "
                f"Read it after that call, from the batch that {LOSS} was given, not from an earlier copy, or train "
                "without replay: use_replay=False."
            )

    def has_run(self, update: int, collected_at: int | None) -> bool:
        """Tell whether replayed rows would be corrected.

        Args:
            update (`int`): Updates done.
            collected_at (`int`, *optional*): Those done when candidates were last collected.

        Raises:
            SeamError: The model is updated since, and no loss went through the seam.
        """
        if self.awaited and collected_at is not None and update > collected_at:
            raise SeamError(
                f"{LOSS} and {LOGPS} were not seen to run in an update: the trainer's loss goes around the seam, "
                f"so that replayed rows could not be corrected. If it stands in {WHOLE}, name it {LOSS}(self, model, "
                "inputs)." + REMEDY
            )
        return self.verified


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
