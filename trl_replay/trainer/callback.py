"""The trainer callback: counts updates, logs what the loss showed, tells trackers the settings, and begins and
ends a run with a line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import SeamError
from ..protocols import AttachedSession

RUNS: Mapping[str, Callable[[], Any]] = {
    "WandbCallback": lambda: getattr(sys.modules.get("wandb"), "run", None),
    "TrackioCallback": lambda: sys.modules.get("trackio"),
}
"""Runs of the trackers that take settings and alarms, by the name of transformers' callback; None where none runs."""


def write_settings(settings: Mapping[str, Any], callbacks: Sequence[Any]) -> None:
    """Write the settings to the trackers of these trainer callbacks, and warn of one that refuses. Call it on the
    main process, when they have begun their runs.

    Args:
        settings (`Mapping`): The settings in force, by name.
        callbacks (`Sequence`): The trainer's.
    """

    def write(run: Any) -> None:
        run.config.update(dict(settings), allow_val_change=True)

    _tell(write, "Replay's settings are not in the run configuration of", callbacks)


def alert(alarms: Mapping[str, str], callbacks: Sequence[Any]) -> None:
    """Send alarms, texts by their names, to those trackers of these trainer callbacks that alert."""

    def send(run: Any) -> None:
        for name, text in alarms.items() if hasattr(run, "alert") else ():
            run.alert(title=f"replay: {name}", text=text)

    _tell(send, "An alarm did not reach", callbacks)


def _tell(act: Callable[[Any], None], failed: str, callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        for name in {base.__name__ for base in type(callback).__mro__} & RUNS.keys():
            try:
                if run := RUNS[name]():
                    act(run)
            except Exception as error:  # a tracker may raise anything; training goes on without its note
                warnings.warn(f"{failed} {name}'s tracker: {type(error).__name__}: {error}", stacklevel=2)


class ReplayCallback(TrainerCallback):
    """Holds the session, never the trainer.

    Args:
        session ([`Session`]): What it tells.
        take_off (`Callable`): Takes the seam off a trainer, and with it this callback.
    """

    def __init__(self, session: AttachedSession, take_off: Callable[[Any, Any], None]) -> None:
        self.session = session
        self._take_off = take_off
        self._trackers_told = False
        self._alarms_told: set[str] = set()
        self._next_look = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training begins.

        Raises:
            SeamError: Another trainer is training, which has this one's callbacks.
        """
        if state is not self.session.trainer.state:
            raise SeamError(
                "A copy of the trainer that replay is attached to is training: it has the callbacks and the methods "
                "of the original, which would train with the original's model. Detach before you copy."
            )
        self._trackers_told = False
        self.session.begin_training(state.max_steps)
        if state.is_world_process_zero and not self.session.detached:
            _print(self.session.reporting.begins())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trackers get the settings: their own callbacks have begun their runs by now, wherever they stand."""
        if self._trackers_told or self.session.detached:
            return
        self._trackers_told = True
        if state.is_world_process_zero:
            write_settings(self.session.config.to_dict(), self.session.trainer.callback_handler.callbacks)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at what the loss has computed, before the model is updated by it."""
        self.session.before_update()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One update more."""
        self.session.updated()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ratio metrics reach the trainer's metrics before it logs this step."""
        self.session.log_ratios()
        if control.should_log or control.should_training_stop:
            self.session.reporting.about_to_log()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer may log by epochs."""
        if control.should_log:
            self.session.reporting.about_to_log()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Alarms go to the trackers, once each; where the policy collapses, a warning says so."""
        log = state.log_history
        early = len(log) < self._next_look and state.global_step < state.max_steps
        if early or not state.is_world_process_zero or self.session.detached:
            return
        self._next_look = int(1.1 * len(log)) + 1  # a look reads the whole log
        _, alarms, _ = self.session.reporting.advise(log)
        new = {name: text for name, text in alarms.items() if name not in self._alarms_told}
        self._alarms_told |= new.keys()
        alert(new, self.session.trainer.callback_handler.callbacks)
        if "collapsed" in new:
            warnings.warn(f"{new['collapsed']}; session.explain() tells what to change.", stacklevel=2)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last candidates settle; the main process prints a line."""
        try:
            self.session.finish()
        finally:
            if self.session.detached:
                self._take_off(self.session.trainer, self.session)
        if state.is_world_process_zero and not self.session.detached:
            _print(f"replay: {self.session.reporting.in_one_line()}; session.explain() tells more")


def _print(text: str) -> None:
    """Print a text to a terminal or file of any encoding: training has ended, and must not fail now."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding))
