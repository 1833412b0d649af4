"""The class that stands in front of the one that makes a trainer's loss, while a loss runs.

An override may copy, shape, move, or reorder the batch before it calls `super()._compute_loss`, and only the class
that makes the loss gets the mapping that the loss reads. So while a loss runs, the trainer's class is a subclass of
its own, in whose method resolution order a class of ours comes right before that one. `torch.nn.utils.parametrize`
swaps a module's class in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from ..compat import HIGH_ENTROPY, LOGPS, LOSS, OLD_LOGPS, REF_LOGPS, is_stock_loss
from ..data.fields import ADVANTAGES
from ..errors import ContractError, SeamError
from .micro_batch import MicroBatch

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

    @staticmethod
    def check_overrides(trainer_class: type, read: Collection[str]) -> None:
        """Look for a term of an override's own in a loss with replayed rows whose batch has no old log-probs.

        Args:
            trainer_class (`type`): The trainer's.
            read (`Collection[str]`): Keys of the batch that were read around the loss that calls no other.

        Raises:
            SeamError: The override asks for old log-probs.
        """
        maker = loss_maker(trainer_class)
        around = [vars(base)[WHOLE] for base in _own(trainer_class, WHOLE)]
        around += [vars(base)[LOSS] for base in _own(trainer_class, LOSS) if issubclass(base, maker) and base != maker]
        if OLD_LOGPS in {*read}.union(*map(_names, around)):
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
    return [base for base in defining if base.__module__.partition(".")[0] not in ("trl", "transformers")]


def loss_maker(trainer_class: type) -> type:
    """The class that makes the loss: TRL's, or that of an override that asks for log-probs and calls no other loss."""
    defining = [base for base in trainer_class.__mro__ if LOSS in vars(base)]
    names = {base: _names(vars(base)[LOSS]) for base in defining}
    return next((base for base in defining if LOGPS in names[base] and LOSS not in names[base]), defining[-1])


def _names(function: Any, seen: frozenset[Any] = frozenset()) -> set[Any]:
    """What a function's code names, functions that it wraps or encloses included."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return set()
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return _in_code(function.__code__).union(*(_names(one, seen | {function}) for one in enclosed))


def _in_code(code: CodeType) -> set[Any]:
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
