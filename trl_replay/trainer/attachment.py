"""attach, detach, attached: puts the seam on one trainer instance and takes it off again."""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from .. import compat
from ..built_in import ask_built_in
from ..compat import Dialect
from ..errors import AttachError, ConfigurationError
from ..protocols import AttachedSession
from ..session import Session
from ..setup.assembly import assemble, idle_components, of_loss
from ..setup.config import ReplayConfig
from ..setup.preflight import misgivings, preflight, try_model
from ..setup.settings import Settings, choose_scope_of, resolve
from .seam import put_on, refuse_foreign_overrides, refuse_patches_on_top, take_off

_sessions: weakref.WeakKeyDictionary[Any, AttachedSession] = weakref.WeakKeyDictionary()


def attach(trainer: Any, config: ReplayConfig | None = None, **settings: Any) -> Session:
    """Attach a replay buffer to a stock `trl.GRPOTrainer`, or to TRL's `AsyncGRPOTrainer`. The trainer then replays
    in every `train()` until `detach`.

    Everything is checked and built before the trainer is touched: after an error it is as it was.

    Args:
        trainer (`trl.GRPOTrainer`): The trainer instance. Its class and other trainers are not affected.
        config ([`ReplayConfig`], *optional*): The settings.
        **settings: Single settings of [`ReplayConfig`], instead of or on top of `config`.

    Returns:
        [`Session`]: With `buffer`, `metrics`, and `explain()`. That of an
        asynchronous trainer is of another class, with the same methods.

    Raises:
        ConfigurationError: A setting can't be used, or a name is unknown.
        ContractError: The TRL release or the trainer lacks what the seam needs.
        AttachError: What is given is no trainer, replay is attached already, or something else has replaced a method
            of the seam.
        RefusedError: Preflight checks found reasons not to attach.
        PluginError: A plugin that the configuration names could not be loaded.

    Example:
        ```python
        trainer = GRPOTrainer(model, reward_funcs, args=args, train_dataset=dataset)
        session = trl_replay.attach(trainer, replay_buffer_size=64)
        trainer.train()
        ```
    """
    _refuse_no_trainer("attach()", trainer)
    if config is not None and not isinstance(config, ReplayConfig):
        raise ConfigurationError(
            f"attach() takes a ReplayConfig after the trainer, not a {type(config).__name__}: give settings by name, "
            "such as attach(trainer, replay_buffer_size=64)."
        )
    config = (config or ReplayConfig()).with_settings(settings, "attach()").with_preset().in_force()
    present = _sessions.get(trainer)
    if present is not None and present.enabled:
        raise AttachError("Replay is attached to this trainer already. Call trl_replay.detach(trainer) first.")
    in_force = resolve(config)
    made = ask_built_in("make_session", trainer, in_force) if in_force.acts else None
    session: Session = made or _make_session(trainer, in_force)
    if session.enabled:
        refuse_foreign_overrides(trainer, session.seam)
        _begin(trainer, session)
    else:
        session.roll_call.announce_inactive()
        _sessions[trainer] = session
    return session


def _make_session(trainer: Any, settings: Settings) -> Session:
    """Build the session of a GRPOTrainer, which is only read."""
    components = idle_components(settings)
    if settings.acts:
        compat.check_release()
        dialect = ask_built_in("make_dialect", trainer)
        if dialect is None:
            compat.refuse_others(trainer)
            dialect = Dialect()
        compat.check_contract(trainer, dialect.problems(trainer))
        settings = choose_scope_of(trainer, settings)
        components = assemble(trainer, settings, of_loss(trainer, settings))
        components.dialect = dialect
        preflight(trainer, settings, components)
        dialect.check(trainer)
        trial = try_model(trainer, dialect.runs_model)
        components.loss.bounds.noise = trial.noise
        for text in misgivings(trainer, settings, components, trial):
            warnings.warn(text, stacklevel=3)
    session = Session(trainer, settings, components)
    if session.enabled and compat.LOSS in session.seam:
        session.step.tap.classes.check(trainer)
    return session


def _begin(trainer: Any, session: AttachedSession) -> None:
    """Put the seam on, and tell the plugins; after an error the trainer is as it was."""
    put_on(trainer, session)
    _sessions[trainer] = session
    try:
        session.notify("attached")
    except BaseException:
        session.mark_detached()
        take_off(trainer, session)
        del _sessions[trainer]
        raise


def is_attached(trainer: Any) -> bool:
    """Tell whether `attach` was called for this trainer, also with settings under which it does nothing."""
    return trainer in _sessions


def detach(trainer: Any) -> None:
    """Take the seam off again: the trainer's methods are its class's, bit for bit as before.

    Call it on every process, between trainings.

    Raises:
        AttachError: It is no trainer, nothing is attached, or something was patched on top since; or a batch is being
            scored, or several processes are training. Nothing is changed then.
    """
    _refuse_no_trainer("detach()", trainer)
    session = _sessions.get(trainer)
    if session is None:
        raise AttachError("Replay is not attached to this trainer.")
    if not session.enabled:
        del _sessions[trainer]
        return
    refuse_patches_on_top(trainer, session)
    if session.scoring or (session.components.processes > 1 and compat.is_training(trainer)):
        raise AttachError(
            "detach() was called in the midst of training, where other processes or the batch at hand go on with "
            "replay: detach between trainings. To train without replay, set use_replay=False."
        )
    del _sessions[trainer]
    session.mark_detached()
    take_off(trainer, session)
    session.notify("detached")


def attached(trainer: Any, config: ReplayConfig | None = None, **settings: Any) -> Attached:
    """`attach` for the length of a `with` block, or until `detach` in it. Without one, replay stays attached.

    Example:
        ```python
        with trl_replay.attached(trainer, replay_evictor="fifo") as session:
            trainer.train()
        ```
    """
    return Attached(trainer, attach(trainer, config, **settings))


class Attached(AbstractContextManager[Session]):
    """The block of `attached`."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session

    def __enter__(self) -> Session:
        return self._session

    def __exit__(self, *raised: object) -> None:
        if _sessions.get(self._trainer) is self._session:
            detach(self._trainer)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttachError(
            f"attached(trainer) is for a with statement, whose session has {name}: with trl_replay.attached(trainer) "
            "as session: …; or session = trl_replay.attach(trainer)."
        )


def _refuse_no_trainer(function: str, given: Any) -> None:
    """Refuse what is no trainer at all: its arguments, its class, a model's name.

    Raises:
        AttachError: In one line, whatever it is.
    """
    from transformers import Trainer

    if not isinstance(given, Trainer):
        raise AttachError(
            f"{function} takes a trl.GRPOTrainer, not a {type(given).__name__}: make the trainer first, as in "
            "trainer = GRPOTrainer(…), and give that."
        )
