"""attach, detach, attached: puts the seam on one trainer instance and takes it off again."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import compat
from ..assembly import assemble, dropout_modules, idle_components, preflight
from ..checkpoint import seam as checkpoint_seam
from ..config import ReplayConfig
from ..errors import AttachError, ConfigurationError
from ..loss.micro_batch import ROWS
from ..offline import prefill as warm_start
from ..offline.export import export
from ..registry import registry
from ..session import Session
from . import completions_table as completions
from .callback import ReplayCallback

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


class SeamFunction:
    """What stands on the trainer in a method's place: looks the class's method up when called, and knows its
    session."""

    def __init__(
        self,
        trainer: Any,
        name: str,
        session: Session,
        around: Callable[..., Any],
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self._around = around
        self.name = name
        self.session = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the trainer's own method, with the session around it."""
        trainer = self._trainer()
        if trainer is None:
            raise AttachError(f"{self.name} was called through a trainer that no longer exists.")
        stock = getattr(type(trainer), self.name).__get__(trainer)
        return self._around(self.session, trainer, stock, *args, **kwargs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "A trainer with replay attached can't be pickled or copied: call trl_replay.detach(trainer) first and "
            "attach again afterwards."
        )


def _score(session: Session, trainer: Any, stock: Callable[..., Any], inputs: Any) -> Any:
    session.replaced = []
    try:
        batch = stock(inputs)
        session.replaced = [False] * (len(inputs) * trainer.accelerator.num_processes)
        if not trainer.model.training or session.paused:
            return batch
        return session.step(compat.with_old_logps(trainer, batch) if session.tap.forward else batch)
    finally:
        completions.mark(trainer, session.replaced)


def _rewards(
    session: Session,
    trainer: Any,
    stock: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    rewards = stock(*args, **kwargs)
    if trainer.model.training and not session.paused:
        session.rewards = rewards
    return rewards


def _loss(
    session: Session,
    trainer: Any,
    stock: Callable[..., Any],
    model: Any,
    inputs: Any,
) -> Any:
    return session.tap.loss(lambda micro: stock(model, micro), inputs)


def _logps(
    session: Session,
    trainer: Any,
    stock: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return session.tap.logps(stock(*args, **kwargs))


_AROUND: dict[str, Callable[..., Any]] = {
    compat.SCORE: _score,
    compat.REWARDS: _rewards,
    compat.LOSS: _loss,
    compat.LOGPS: _logps,
    compat.OTHER_LOSS: _loss,
    compat.SAVE: checkpoint_seam.save,
    compat.LOAD: checkpoint_seam.load,
}


def attach(trainer: Any, config: ReplayConfig | None = None, **settings: Any) -> Session:
    """Attaches a replay buffer to a stock `trl.GRPOTrainer`. The trainer then replays in every `train()` until
    `detach`.

    Everything is checked and built before the trainer is touched: after an error it is as it was.

    Args:
        trainer (`trl.GRPOTrainer`): The trainer instance. Its class and other trainers are not affected.
        config ([`ReplayConfig`], *optional*): The settings.
        **settings: Single settings of [`ReplayConfig`], instead of or on top of `config`.

    Returns:
        [`Session`]: With `buffer`, `metrics`, `explain()`, `pause()` and `resume()`.

    Raises:
        ConfigurationError: A setting can't be used, or a name is unknown.
        ContractError: The TRL release or the trainer lacks what the seam needs.
        AttachError: Replay is attached already, or something else has replaced a method of the seam.
        RefusedError: Preflight checks found reasons not to attach.
        PluginError: A plugin that the configuration names could not be loaded.

    Example:
        ```python
        trainer = GRPOTrainer(model, reward_funcs, args=args, train_dataset=dataset)
        session = trl_replay.attach(trainer, replay_buffer_size=64)
        trainer.train()
        ```
    """
    if config is not None and not isinstance(config, ReplayConfig):
        raise ConfigurationError(
            f"attach() takes a ReplayConfig after the trainer, not {config!r}: give settings by name, such as "
            "attach(trainer, replay_buffer_size=64)."
        )
    config = (config or ReplayConfig()).with_settings(settings, "attach()")
    present = _sessions.get(trainer) if trainer is not None else None
    if present is not None and present.enabled:
        raise AttachError("Replay is attached to this trainer already. Call trl_replay.detach(trainer) first.")
    if not config.use_replay or config.replay_buffer_size == 0:
        session = Session(trainer, config, idle_components(), enabled=False)
        session.exporter = _exporter(weakref.ref(session))
        _sessions[trainer] = session
        return session
    compat.check_release()
    compat.check_contract(trainer)
    _refuse_foreign_overrides(trainer)
    config, components = assemble(trainer, config, registry())
    preflight(trainer, config, components)
    session = Session(trainer, config, components)
    for name in compat.seam(trainer):
        trainer.__dict__[name] = SeamFunction(trainer, name, session, _AROUND[name])
    completions.begin(trainer)
    trainer.add_callback(ReplayCallback(session))
    session.buffer.adder = _adder(weakref.ref(session))
    session.exporter = _exporter(weakref.ref(session))
    _sessions[trainer] = session
    try:
        _warn_of_dropout(trainer)
        _warn_of_absolute_positions(trainer)
        session.notify("attached")
    except BaseException:
        _take_off(trainer, session)
        raise
    return session


def detach(trainer: Any) -> None:
    """Takes the seam off again: the trainer's methods are its class's, bit for bit as before.

    Raises:
        AttachError: Nothing is attached, or something was patched on top since; nothing is changed then.
    """
    session = _sessions.get(trainer)
    if session is None:
        raise AttachError("Replay is not attached to this trainer.")
    if session.enabled:
        for name in compat.seam(trainer):
            found = trainer.__dict__.get(name)
            if not (isinstance(found, SeamFunction) and found.session is session):
                raise AttachError(
                    f"{name} was replaced by {_origin(found)} after replay was attached. Undo that first, then detach."
                )
        _take_off(trainer, session)
        session.notify("detached")
    else:
        del _sessions[trainer]


def _take_off(trainer: Any, session: Session) -> None:
    _forget_buffered(trainer)
    for name in compat.seam(trainer):
        del trainer.__dict__[name]
    completions.end(trainer)
    handler = trainer.callback_handler
    # a new list: a callback may be detaching while the old one is walked
    handler.callbacks = [
        callback for callback in handler.callbacks if getattr(callback, "session", None) is not session
    ]
    del _sessions[trainer]


def _forget_buffered(trainer: Any) -> None:
    """Replayed rows left in the trainer's buffer can't be trained on without the tap: stock scores a new batch
    instead."""
    buffered = getattr(trainer, compat.BUFFERED, None) or []
    if any(bool(micro[ROWS][:, 1].any()) for micro in buffered if ROWS in micro):
        setattr(trainer, compat.BUFFERED, None)  # stock's own sign that it must generate
    for micro in buffered:
        micro.pop(ROWS, None)


@contextmanager
def attached(trainer: Any, config: ReplayConfig | None = None, **settings: Any) -> Iterator[Session]:
    """`attach` for the length of a `with` block.

    Example:
        ```python
        with trl_replay.attached(trainer, replay_evictor="fifo") as session:
            trainer.train()
        ```
    """
    session = attach(trainer, config, **settings)
    try:
        yield session
    finally:
        detach(trainer)


def _adder(session: weakref.ref[Session]) -> Callable[[Any, str], int]:
    """What `session.buffer.add` calls; holds the session weakly, which holds the buffer."""

    def add(source: Any, incomplete: str) -> int:
        found = session()
        if found is None:
            raise AttachError("The session of this buffer no longer exists.")
        return warm_start.add(found, source, incomplete)

    return add


def _exporter(session: weakref.ref[Session]) -> Callable[[str | Path], Path]:
    """What `session.export` calls; holds the session weakly, which holds it."""

    def write(path: str | Path) -> Path:
        found = session()
        assert found is not None  # it is the caller
        return export(path, found.trainer, found.components)

    return write


def _refuse_foreign_overrides(trainer: Any) -> None:
    for name in compat.seam(trainer):
        found = trainer.__dict__.get(name)
        if found is not None:
            raise AttachError(
                f"{name} of this trainer has been replaced by {_origin(found)}; wrapping it too could train on "
                "the wrong values. Undo that replacement, or make it on the class."
            )


def _warn_of_dropout(trainer: Any) -> None:
    dropping = dropout_modules(trainer.model)
    if dropping:
        warnings.warn(
            f"The model has dropout ({', '.join(dropping[:3])}{', …' if len(dropping) > 3 else ''}): the "
            f"log-probs that replay "
            "corrects with carry one draw of it, as TRL's own old log-probs do.",
            stacklevel=3,
        )


def _warn_of_absolute_positions(trainer: Any) -> None:
    if any(name.endswith("wpe") for name, _ in trainer.model.named_modules()):
        warnings.warn(
            "The model has learned absolute positions (wpe), and TRL pads prompts on the left without position "
            "ids: the "
            "log-probs of a row change with the width of its batch, so that replay's importance ratios are only "
            "approximate. Prompts of one length, or a model with rotary positions, avoid this.",
            stacklevel=3,
        )


def _origin(found: Any) -> str:
    if found is None:
        return "nothing"
    function = inspect.unwrap(getattr(found, "__func__", found))
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"{where}.{getattr(function, '__qualname__', type(function).__qualname__)}"
