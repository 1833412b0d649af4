"""autoattach: every GRPOTrainer of this process attaches replay when it trains, without a line in the script.

`trl-replay run` does it to the processes of a command: its `sitecustomize` (in `bootstrap`) calls
`autoattach_from_environment` when TRL's trainer has been imported.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..bootstrap.sitecustomize import TRAINER_MODULE, VARIABLE, WhenImported, report
from ..config import ReplayConfig
from ..errors import ReplayError

LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Where launchers say how many ranks they started on this machine."""


@dataclass(eq=False)
class Autoattachment:
    """One call of `autoattach`: its settings, and the folder for receipts under `trl-replay run`."""

    config: ReplayConfig
    reports: str | None = None


_in_force: list[Autoattachment] = []
"""The last one's settings hold."""
_handled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers that have trained: they are attached to once, and not again after `detach`."""


def autoattach(**settings: Any) -> Callable[[], None]:
    """From now on, every `trl.GRPOTrainer` of this process, subclasses included, attaches replay when it first trains.

    A trainer to which replay is attached already keeps the settings it has. Call it before or after trl is imported,
    which it does not import. Of several calls the last one's settings hold.

    Args:
        **settings: Of [`ReplayConfig`].

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
    chosen = Autoattachment(ReplayConfig().with_settings(settings, "autoattach()"))
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


class Replaced(NamedTuple):
    """A class's attribute that was replaced by ours; before, the class had none of its own if that is None."""

    cls: type
    name: str
    before: Any
    ours: Any

    def put_back(self) -> None:
        """Not where somebody has replaced ours again: theirs stays, and ours does nothing more."""
        if vars(self.cls).get(self.name) is not self.ours:
            return
        if self.before is None:
            delattr(self.cls, self.name)
        else:
            setattr(self.cls, self.name, self.before)


class _Watch:
    """Puts `train` methods that attach first on the trainer's class and its subclasses, and takes them off again."""

    def __init__(self) -> None:
        self._finder = WhenImported(TRAINER_MODULE, lambda module: self._watch_trainer(module.GRPOTrainer))
        self._replaced: list[Replaced] = []

    def begin(self) -> None:
        """Now, or as soon as TRL's trainer has been imported."""
        trainer_class = getattr(sys.modules.get(TRAINER_MODULE), "GRPOTrainer", None)
        if trainer_class is not None:
            self._watch_trainer(trainer_class)
        elif self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        """The classes are as they were."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for replaced in reversed(self._replaced):
            replaced.put_back()
        self._replaced.clear()

    def _watch_trainer(self, trainer_class: type) -> None:
        """The trainer's class, the subclasses that it has, and those that it will have."""
        if any(replaced.cls is trainer_class for replaced in self._replaced):
            return
        self._wrap_train(trainer_class)
        self._watch_future_subclasses(trainer_class)
        waiting: list[type] = trainer_class.__subclasses__()
        while waiting:
            cls = waiting.pop(0)
            self._wrap_train(cls)
            waiting += cls.__subclasses__()

    def _wrap_train(self, cls: Any) -> None:
        """Nothing to do where `train` is inherited from a class that attaches already."""
        found = cls.train
        if any(found is replaced.ours for replaced in self._replaced):
            return
        own = vars(cls).get("train")

        @functools.wraps(found)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            _attach_once(trainer)
            above: Any = super(cls, trainer)
            stock = above.train if own is None else own.__get__(trainer, type(trainer))
            return stock(*args, **kwargs)

        self._replace(cls, "train", train)

    def _watch_future_subclasses(self, trainer_class: Any) -> None:
        own = vars(trainer_class).get("__init_subclass__")

        @classmethod  # type: ignore[misc]
        def init_subclass(cls: Any, **kwargs: Any) -> None:
            if own is None:
                super(trainer_class, cls).__init_subclass__(**kwargs)
            else:
                own.__get__(None, cls)(**kwargs)
            self._wrap_train(cls)

        self._replace(trainer_class, "__init_subclass__", init_subclass)

    def _replace(self, cls: type, name: str, ours: Any) -> None:
        before = vars(cls).get(name)
        setattr(cls, name, ours)
        self._replaced.append(Replaced(cls, name, before, ours))


_watch = _Watch()


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
        _tell(trainer, event="refused", reason=reason)
        raise
    _handled.add(trainer)
    _tell(trainer, event="attached", own=own)
    _leave_environment()


def _tell(trainer: Any, **facts: Any) -> None:
    """A receipt for `trl-replay run`, if it started this process."""
    reports = _in_force[0].reports
    if reports is None:
        return
    accelerator = trainer.accelerator
    report(
        reports,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        launcher={name: os.environ[name] for name in LOCAL_WORLD_SIZES if name in os.environ},
        **facts,
    )


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
