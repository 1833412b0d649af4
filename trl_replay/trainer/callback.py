"""The trainer callback: counts updates, logs what the loss showed, and ends a run with a summary."""

from __future__ import annotations

from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .. import compat
from ..offline.prefill import begin
from ..session import Session


class ReplayCallback(TrainerCallback):
    """Holds the session, never the trainer."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Weights may have been loaded since: rows noted before are not recorded any more. The buffer is filled once
        from the file that is to start it, with the model in its place."""
        self.session.tap.forget()
        begin(self.session)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """One update more."""
        self.session.tap.update += 1

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Ratio metrics reach the trainer's metrics before it logs this step; a sync of the reference is noticed."""
        self.session.log_ratios()
        if compat.reference_synced(self.session.trainer, state):
            self.session.reference_synced()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The last candidates settle; the main process prints what happened."""
        self.session.finish()
        if state.is_world_process_zero:
            print(self.session.explain())
