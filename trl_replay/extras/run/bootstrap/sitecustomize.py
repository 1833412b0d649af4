"""Runs at the start of every Python of a command under `trl-replay run`, and waits for a trainer of TRL's.

Most of these processes make no trainer (launchers, compile workers, servers), some have no trl_replay, and some may be
old: from Python 3.7 on nothing in here may fail, print or end a process. It imports what Python has loaded anyway, and
json.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

VARIABLE = "TRL_REPLAY_AUTOATTACH"
"""The environment variable with everything that the processes of a command have to know, as JSON: `settings`;
`reports`, the folder for what they report; and `hook`, the folder of this file."""
TRAINER_MODULES = ("trl.trainer.grpo_trainer", "trl.experimental.async_grpo.async_grpo_trainer")
"""The modules of TRL's trainers; neither imports the other."""


class WhenImported:
    """A finder for `sys.meta_path` that finds nothing by itself: it calls `action(module)` each time that the module
    `name` has been imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the finders after this one find."""
        if name != self.name:
            return None
        for finder in self._finders_after():
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _finders_after(self) -> list[Any]:
        finders = list(sys.meta_path)
        after = finders[finders.index(self) + 1 :] if self in finders else []
        return [finder for finder in after if hasattr(finder, "find_spec")]

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was
            execute(module)
            self.action(module)

        loader.exec_module = execute_and_tell


def report(folder: str, **facts: Any) -> None:
    """Write one process's facts as a file of its own. A folder that is gone, or on another machine, is no error."""
    import json
    import time

    path = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}.json")
    try:
        with open(path + ".part", "w") as file:
            json.dump({"pid": os.getpid(), "python": sys.executable, **facts}, file)
        os.replace(path + ".part", path)
    except OSError:
        pass


def start() -> None:
    """Wait for the trainer, and tell the parent that this process does."""
    import json

    reports = json.loads(os.environ[VARIABLE])["reports"]
    for name in TRAINER_MODULES:
        sys.meta_path.insert(0, WhenImported(name, install))
    report(reports, event="started", installed=_is_installed("trl_replay"))


def install(module: ModuleType) -> None:
    """Have every trainer of this process attach when it trains. What goes wrong is told to the parent."""
    import importlib
    import json

    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "action", None) is not install]
    try:
        importlib.import_module("trl_replay.trainer.autoattach").autoattach_from_environment()
    except Exception as error:
        reports = json.loads(os.environ[VARIABLE])["reports"]
        report(reports, event="failed", reason=f"{type(error).__name__}: {error}")


def leave_path() -> None:
    """Take this folder out of `sys.path`. It stays in the environment, for the processes that a launcher starts."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]


def import_next() -> None:
    """Import the `sitecustomize` in whose place this one stood, if there was one; its errors are its own."""
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


def _is_installed(name: str) -> bool:
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, None) for finder in finders)


if __name__ == "sitecustomize":
    leave_path()
    try:  # noqa: SIM105
        start()
    except Exception:  # no or another variable: this Python is as it would be without us
        pass
    import_next()
