"""autoattach: every trainer of this process attaches replay when it trains, without a line in the script.

`trl-replay run` does it to the processes of a command: its `sitecustomize` (in `bootstrap`) calls
`autoattach_from_environment` when TRL's trainer has been imported.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ReplayError
from ..extras.run.bootstrap.sitecustomize import TRAINER_MODULES, VARIABLE, WhenImported, report
from ..setup.config import ReplayConfig


@dataclass(eq=False)
class Autoattachment:
    """One call of `autoattach`: its settings, and the folder for receipts under `trl-replay run`."""

    config: ReplayConfig
    reports: str | None = None


_in_force: list[Autoattachment] = []
"""The last one's settings hold."""
_handled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers that have trained: they are attached to once, and not again after `detach`."""


def autoattach(config: ReplayConfig | None = None, **settings: Any) -> Callable[[], None]:
    """From now on, every `GRPOTrainer` and `AsyncGRPOTrainer` of TRL's in this process, subclasses included, attaches
    replay when it first trains.

    A trainer to which replay is attached already keeps the settings it has. Call it before or after trl is imported,
    which it does not import. Of several calls the last one's settings hold.

    Args:
        config ([`ReplayConfig`], *optional*): The settings.
        **settings: Single settings of [`ReplayConfig`], instead of or on top of `config`.

    Returns:
        `Callable[[], None]`: Undoes it, for trainers that have not trained yet; the others stay attached. Calling it
        again does nothing.

    Raises:
        ConfigurationError: A setting does not exist or can't be used. What only a trainer can tell is raised by its
            `train`, as [`attach`] raises it.

    Example:
        ```python
        undo = trl_replay.autoattach(replay_buffer_size=64)
        train()  # makes a GRPOTrainer somewhere and trains it
        undo()
        ```
    """
    chosen = Autoattachment((config or ReplayConfig()).with_settings(settings, "autoattach()"))
    _in_force.append(chosen)
    _watch.begin()

    def undo() -> None:
        if chosen in _in_force:
            _in_force.remove(chosen)
        if not _in_force:
            _watch.end()

    return undo


def autoattach_from_environment() -> None:
    """`autoattach` with what `trl-replay run` left in the environment. A call in the script itself wins over it.

    Raises:
        ConfigurationError: Another release of trl_replay wrote settings that this one does not have.
    """
    given: Mapping[str, Any] = json.loads(os.environ[VARIABLE])
    config = ReplayConfig().with_settings(given["settings"], "trl-replay run")
    _in_force.insert(0, Autoattachment(config, given["reports"]))
    _watch.begin()


class _Watch:
    """Puts a `train` on the trainers' common class that attaches first, and takes it off again."""

    def __init__(self) -> None:
        self._finders = [WhenImported(name, self._wrap_train) for name in TRAINER_MODULES]
        self._put_back: Callable[[], None] | None = None

    def begin(self) -> None:
        """Now, or as soon as a trainer of TRL's has been imported."""
        modules = [sys.modules.get(name) for name in TRAINER_MODULES]
        if hasattr(modules[0], "GRPOTrainer") or hasattr(modules[1], "AsyncGRPOTrainer"):  # else it is half imported
            self._wrap_train()
        elif not any(finder in sys.meta_path for finder in self._finders):
            sys.meta_path[:0] = self._finders

    def end(self) -> None:
        """The class is as it was."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in self._finders]
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def _wrap_train(self, _imported: Any = None) -> None:
        """However a subclass of TRL's trainer trains, or Unsloth's copy, it comes to the `train` of transformers'."""
        from transformers import Trainer

        from .. import compat

        if self._put_back is not None:
            return
        stock = {name: getattr(Trainer, name) for name in compat.TRAIN}

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                if _is_synchronous(trainer) or compat.is_unsloth(trainer) or compat.is_asynchronous(trainer):
                    _attach_once(trainer)
                elif any("GRPO" in base.__name__ for base in type(trainer).__mro__):
                    _warn_of_unseen(trainer)
                return function(trainer, *args, **kwargs)

            return train

        ours = {name: wrapped(function) for name, function in stock.items()}

        def put_back() -> None:
            for name, function in stock.items():
                if getattr(Trainer, name) is ours[name]:  # else somebody has replaced ours, which does nothing more
                    setattr(Trainer, name, function)

        for name, function in ours.items():
            setattr(Trainer, name, function)
        self._put_back = put_back


_watch = _Watch()


def _is_synchronous(trainer: Any) -> bool:
    """Tell whether this is TRL's GRPOTrainer, or a subclass."""
    return isinstance(trainer, getattr(sys.modules.get(TRAINER_MODULES[0]), "GRPOTrainer", ()))


def _attach_once(trainer: Any) -> None:
    if not _in_force or trainer in _handled:
        return
    from . import attachment

    chosen = _in_force[-1]
    own = attachment.is_attached(trainer)
    try:
        if not own:
            attachment.attach(trainer, chosen.config)
    except Exception as error:
        reason = str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {error}"
        _tell(event="refused", reason=reason)
        raise
    _handled.add(trainer)
    _tell(event="attached", own=own)
    _leave_environment()


def _warn_of_unseen(trainer: Any) -> None:
    """Say that a trainer of GRPO trains to which replay can't attach: Unsloth's class is a copy of TRL's."""
    if not _in_force or trainer in _handled:
        return
    _handled.add(trainer)
    kind = type(trainer)
    reason = f"a {kind.__name__} trained, which is no subclass of TRL's GRPOTrainer ({kind.__module__})"
    warnings.warn(f"Replay is not attached: {reason}. It trains without replay.", stacklevel=3)
    _tell(event="unseen", reason=reason)


def _tell(**facts: Any) -> None:
    """A receipt for `trl-replay run`, if it started this process."""
    reports = _in_force[0].reports
    if reports is not None:
        report(reports, **facts)


def _leave_environment() -> None:
    """The processes that a training process starts are not for us."""
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return
    hook = json.loads(given)["hook"]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry != hook]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)
