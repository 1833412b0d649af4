"""What one session does with files: fills its buffer from them, and writes or reads its entries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.validation import choice, column_names, optional, require, true_or_false
from ...data.types import Entry
from ...distributed.roll_call import RollCall
from ...errors import ReplayError
from ...setup.components import Components
from .export import of_buffer, read_entry, write
from .prefill import Intake
from .reader import Reading


class Files:
    """The files of one session.

    Args:
        trainer (`Callable`): Gives the trainer.
        components ([`Components`]): The buffer, and what its rows are like.
        roll_call ([`RollCall`]): Waits for the other processes.
    """

    def __init__(self, trainer: Callable[[], Any], components: Components, roll_call: RollCall) -> None:
        self._trainer = trainer
        self._components = components
        self._config = components.settings.config
        self._roll_call = roll_call

    def warm_start(self, again: bool = False) -> None:
        """Fill the buffer from `replay_warm_start`, once in the life of a run, and again once its groups have left as
        those of another reward rule.

        Args:
            again (`bool`): This process takes part though its own buffer may have them still.
        """
        config, buffer = self._config, self._components.buffer
        path = config.replay_warm_start
        if path is None or (buffer.warmed and not again):
            return
        short, rescore = config.replay_warm_start_short, config.replay_warm_start_rescore
        count = self._add(path, short, None, rescore, offers=not buffer.warmed)
        if not count and self._trainer().accelerator.is_main_process:
            reasons = "; ".join(buffer.totals.reasons) or "it has no rows"
            warnings.warn(f"replay_warm_start={path!r} added no group: {reasons}.", stacklevel=2)
        buffer.warmed = True

    def add(self, source: Any, incomplete: str, columns: Mapping[str, str] | None, rescore: bool) -> int:
        """Add groups made elsewhere: [`Session.add`]."""
        require("incomplete", incomplete, choice("refuse", "resample"))
        require("columns", columns, optional(column_names))
        require("rescore", rescore, true_or_false)
        return self._add(source, incomplete, columns, rescore)

    def _add(
        self, source: Any, incomplete: str, columns: Mapping[str, str] | None, rescore: bool, offers: bool = True
    ) -> int:
        if self._components.processes > 1:
            self._roll_call("add", "adding groups to its buffer")
        may_be_alike = self._components.mixes_rows and self._config.replay_advantages != "stored"
        intake = Intake(self._trainer(), self._components, may_be_alike, offers)
        return intake.add(Reading(source, incomplete, columns or {}, rescore))

    def entry(self, serial: int) -> Entry:
        """Read an entry: [`Session.entry`]."""
        buffer = self._components.buffer
        if serial not in buffer:
            raise KeyError(
                f"The buffer has no entry {serial!r}: it may have left; list(session.buffer) gives the serial numbers "
                "of those that are there."
            )
        if serial not in buffer.held():
            owner = int(buffer.table.owner[buffer.table.rows_of([serial])[0]])
            raise ReplayError(
                f"The payload of entry {serial} is not here: it is on rank {owner}, where it arrives after the batch "
                "in which the entry is stored has been planned."
            )
        return read_entry(serial, buffer, self._trainer())

    def export(self, path: str | Path) -> Path:
        """Write the entries that this process holds: [`Session.export`]."""
        path, trainer, components = Path(path), self._trainer(), self._components
        rank, ranks = int(trainer.accelerator.process_index), components.processes
        if ranks > 1:
            path = path.with_stem(f"{path.stem}-{rank:05d}-of-{ranks:05d}")
        write(path, of_buffer(components.buffer, components.tasks, trainer))
        return path
