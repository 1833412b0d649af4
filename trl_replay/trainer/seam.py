"""The seam: what `attach` puts on one trainer in the place of its methods, and `detach` takes off again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import compat
from ..checkpoint import saving
from ..errors import AttachError, SeamError
from ..protocols import AttachedSession
from ..session import Session
from .callback import ReplayCallback

COPIED = "__getstate__"
"""Methods that `copy` and `pickle` ask an instance for: a copy would train with this trainer's model."""


class SeamFunction:
    """Stands on the trainer in a method's place: looks the class's method up when called, and knows its
    session."""

    def __init__(self, trainer: Any, name: str, session: AttachedSession, around: Callable[..., Any]) -> None:
        self._trainer = weakref.ref(trainer)
        self._around = around
        self.name = name
        self.session = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the trainer's own method, with the session around it."""
        trainer = self._trainer()
        if trainer is None:
            raise AttachError(f"{self.name} was called through a trainer that no longer exists.")
        stock = getattr(type(trainer), self.name).__get__(trainer)
        return self._around(self.session, trainer, stock, *args, **kwargs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _refuse_copies()


def _refuse_copies() -> NoReturn:
    raise TypeError(
        "A trainer with replay attached can't be pickled or copied: call trl_replay.detach(trainer) first and attach "
        "again afterwards."
    )


def put_on(trainer: Any, session: AttachedSession) -> None:
    """Put the seam on: wrapped methods, and a callback."""
    around = {**_AROUND, **session.components.dialect.around}
    for name in session.seam:
        trainer.__dict__[name] = SeamFunction(trainer, name, session, around[name])
    trainer.__dict__[COPIED] = _refuse_copies
    session.put_on(trainer)
    trainer.add_callback(ReplayCallback(session, take_off))


def take_off(trainer: Any, session: AttachedSession) -> None:
    """Take the seam off: the trainer's methods are its class's."""
    session.take_off(trainer)
    for name in session.seam:
        if _is_ours(trainer.__dict__.get(name), session):
            del trainer.__dict__[name]
    trainer.__dict__.pop(COPIED, None)
    handler = trainer.callback_handler
    # a new list: a callback may be detaching while the old one is walked
    handler.callbacks = [
        callback for callback in handler.callbacks if getattr(callback, "session", None) is not session
    ]


def refuse_foreign_overrides(trainer: Any, seam: Sequence[str]) -> None:
    """Refuse a trainer on which something else stands in the place of a method.

    Args:
        trainer (`trl.GRPOTrainer`): Before anything is attached.
        seam (`Sequence[str]`): Names of the methods to wrap.

    Raises:
        AttachError: Names the method, and what replaced it.
    """
    for name in seam:
        found = trainer.__dict__.get(name)
        if found is not None:
            raise AttachError(
                f"{name} of this trainer has been replaced by {_origin(found)}; wrapping it too could train on "
                "the wrong values. Undo that replacement, or make it on the class."
            )


def refuse_patches_on_top(trainer: Any, session: AttachedSession) -> None:
    """Refuse to take the seam off where something else stands in its place by now.

    Raises:
        AttachError: Names the method, and what replaced it.
    """
    for name in session.seam:
        found = trainer.__dict__.get(name)
        if not _is_ours(found, session):
            raise AttachError(
                f"{name} was replaced by {_origin(found)} after replay was attached. Undo that first, then detach."
            )


def _score(session: Session, trainer: Any, stock: Callable[..., Any], inputs: Any) -> Any:
    step = session.step
    if session.scoring:  # the trainer scores again while it scores: what it returns at last counts
        return stock(inputs)
    step.judge.rewards = []
    try:
        if not trainer.model.training:
            return stock(inputs)
        step.template = None
        batch = stock(step.begin(inputs))
        scored = session.components.dialect.incoming(trainer, batch)
        composed = step.take(scored, lambda rows: _score_again(session, trainer, stock, rows))
        return session.components.dialect.outgoing(trainer, composed)
    finally:
        step.judge.rewards = None


def _score_again(session: Session, trainer: Any, stock: Callable[..., Any], inputs: Any) -> Any:
    """A further round of the batch at hand, with rewards of its own."""
    session.step.judge.rewards = []
    return session.components.dialect.incoming(trainer, stock(session.step.note_tasks(inputs)))


def _rewards(session: Session, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rewards = stock(*args, **kwargs)
    if session.step.judge.rewards is not None:
        session.step.judge.rewards.append(rewards)
    return rewards


def _loss(session: Session, trainer: Any, stock: Callable[..., Any], model: Any, inputs: Any) -> Any:
    if not session.step.tap.opens(inputs, trainer.model.training):
        return stock(model, inputs)
    if not _is_ours(found := trainer.__dict__.get(compat.LOGPS), session):
        raise SeamError(
            f"{compat.LOGPS} was replaced by {_origin(found)} after replay was attached: stored log-probs would "
            "be compared with others. Make that replacement on the class, or train without replay: use_replay=False."
        )
    with session.step.tap.classes.inserted(trainer):
        whole = getattr(type(trainer), compat.LOSS).__get__(trainer)
        return session.step.tap.loss(lambda batch: whole(model, batch), inputs, has_overrides=True)


def _logps(session: Session, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tap = session.step.tap
    model, ids = (*args, *(kwargs[name] for name in ("model", "input_ids")[len(args) :]))[:2]
    micro = tap.asks(model, ids)
    result = stock(*args, **kwargs)
    return result if micro is None else tap.logps(micro, result)


def _high_entropy(session: Session, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return session.step.tap.high_entropy(stock(*args, **kwargs))


def _prepare(session: Session, trainer: Any, stock: Callable[..., Any], inputs: Any) -> Any:
    """Give a further iteration a batch of groups drawn anew, or the composed batch where nothing is drawn."""
    step = session.step
    template = step.template
    if template is not None and compat.begins_iteration(trainer) and template.step != compat.step(trainer):
        template.step = compat.step(trainer)
        template.micro_batches = template.micro_batches or getattr(trainer, compat.BUFFERED)
        drawn = step.iterate(template)
        seed = int(session.buffer.generators.local.integers(2**63))
        again = template.micro_batches if drawn is None else compat.micro_batches(trainer, drawn, seed)
        setattr(trainer, compat.BUFFERED, again)
    return stock(inputs)


def _save(session: AttachedSession, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with session.saving():
        return saving.save(session, trainer, stock, *args, **kwargs)


_AROUND: dict[str, Callable[..., Any]] = {
    compat.SCORE: _score,
    compat.REWARDS: _rewards,
    compat.LOSS: _loss,
    compat.LOGPS: _logps,
    compat.HIGH_ENTROPY: _high_entropy,
    compat.PREPARE: _prepare,
    compat.SAVE: _save,
    compat.LOAD: saving.load,
}


def _is_ours(found: Any, session: AttachedSession) -> bool:
    return isinstance(found, SeamFunction) and found.session is session


def _origin(found: Any) -> str:
    if found is None:
        return "nothing"
    function = inspect.unwrap(getattr(found, "__func__", found))
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"{where}.{getattr(function, '__qualname__', type(function).__qualname__)}"
