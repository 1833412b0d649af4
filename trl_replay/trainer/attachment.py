"""attach, detach, attached: puts the seam on one trainer instance and takes it off again."""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from .. import compat
from ..errors import AttachError, ConfigurationError
from ..extras.asynchronous.session import AsyncSession, make_session
from ..extras.files.session_files import Files
from ..extras.outcome.advisor import RunAdvisor
from ..extras.unsloth.layout_probe import check_layout
from ..extras.unsloth.loss import as_trl
from ..session import Session
from ..setup.assembly import assemble, idle_components, of_loss
from ..setup.config import ReplayConfig
from ..setup.model_trial import try_model
from ..setup.preflight import misgivings, preflight
from ..setup.settings import choose_scope_of, resolve
from .seam import AnySession, leave, put_on, refuse_foreign_overrides, refuse_patches_on_top, take_off

_sessions: weakref.WeakKeyDictionary[Any, AnySession] = weakref.WeakKeyDictionary()


def attach(trainer: Any, config: ReplayConfig | None = None, **settings: Any) -> AnySession:
    """Attach a replay buffer to a stock `trl.GRPOTrainer`, or to TRL's `AsyncGRPOTrainer`. The trainer then replays
    in every `train()` until `detach`.

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
    if in_force.acts and compat.is_asynchronous(trainer):
        return _begin_queue(trainer, make_session(trainer, in_force))
    components = idle_components(in_force)
    if in_force.acts:
        compat.check_release()
        compat.check_contract(trainer)
        in_force = choose_scope_of(trainer, in_force)
        refuse_foreign_overrides(trainer, in_force.iterates)
        components = assemble(trainer, in_force, of_loss(trainer, in_force))
        preflight(trainer, in_force, components)
        check_layout(trainer)
        trial = try_model(trainer)
        components.loss.bounds.noise = trial.noise
        for text in misgivings(trainer, in_force, components, trial):
            warnings.warn(text, stacklevel=2)
    session = Session(trainer, in_force, components, RunAdvisor())
    session.files = Files(session, as_trl)
    if session.enabled:
        session.step.tap.classes.check(trainer)
        _begin(trainer, session)
    else:
        session.roll_call.announce_inactive()
        _sessions[trainer] = session
    return session


def _begin_queue(trainer: Any, session: AsyncSession) -> AsyncSession:
    """Begin a session of an asynchronous trainer, whose dataset takes its queue when training begins.

    Raises:
        AttachError: It is training already, or something has replaced a method of the seam.
    """
    if trainer.is_in_train:
        raise AttachError("Attach to an AsyncGRPOTrainer before train(): its dataset has taken its queue by now.")
    refuse_foreign_overrides(trainer, False)
    session.files = Files(session)
    _begin(trainer, session)
    return session


def _begin(trainer: Any, session: AnySession) -> None:
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

    Call it on every process. From a callback, in the midst of training on several processes, it acts at the next
    generation batch or at the end of training, whichever comes first: see docs/processes.md#what-processes-exchange.

    Raises:
        AttachError: It is no trainer, nothing is attached, or something was patched on top since; nothing is changed
            then.
    """
    _refuse_no_trainer("detach()", trainer)
    session = _sessions.get(trainer)
    if session is None:
        raise AttachError("Replay is not attached to this trainer.")
    if not session.enabled:
        del _sessions[trainer]
        return
    refuse_patches_on_top(trainer, session)
    del _sessions[trainer]
    session.mark_detached()
    leave(trainer, session)
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


class Attached(AbstractContextManager[AnySession]):
    """The block of `attached`."""

    def __init__(self, trainer: Any, session: AnySession) -> None:
        self._trainer = trainer
        self._session = session

    def __enter__(self) -> AnySession:
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
