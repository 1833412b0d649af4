"""State of a curriculum: one for each session, saved with its checkpoints."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any, Generic, TypeVar

from trl_replay import PromptTable, hookimpl

State = TypeVar("State")
FILE = "state.json"


class SavesState(Generic[State]):
    """Keeps a dataclass of numbers for each session. One plugin object serves all sessions of a process, and a session
    is told from others by its table of prompts."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[PromptTable, State] = weakref.WeakKeyDictionary()

    def first_state(self) -> State:
        """The state that a session begins with: each curriculum gives it."""
        raise NotImplementedError

    def state(self, prompts: PromptTable) -> State:
        """The state of the session with this table."""
        if prompts not in self._states:
            self._states[prompts] = self.first_state()
        return self._states[prompts]

    @hookimpl
    def trl_replay_save(self, session: Any, directory: Path) -> None:
        """Write the numbers."""
        if session.prompts is not None:
            (directory / FILE).write_text(json.dumps(vars(self.state(session.prompts))))

    @hookimpl
    def trl_replay_load(self, session: Any, directory: Path) -> None:
        """Read them, if this curriculum was there when the checkpoint was written."""
        file = directory / FILE
        if session.prompts is None or not file.is_file():
            return
        state = self.state(session.prompts)
        for name, value in json.loads(file.read_text()).items():
            setattr(state, name, value)
