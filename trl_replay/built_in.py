"""The package's own extras, named by their modules: nothing below the command line imports one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BUILT_IN = (
    "trl_replay.extras.asynchronous.session",
    "trl_replay.extras.files.session_files",
    "trl_replay.extras.outcome.advice",
    "trl_replay.extras.unsloth.layout",
)
"""Modules that have one of these functions: `make_session(trainer, settings)` ([`AttachedSession`]),
`make_layout(trainer)` ([`Layout`]), `make_files(session)` ([`SessionFiles`]), `make_advisor()` ([`Advisor`])."""


def ask_built_in(function: str, *given: Any) -> Any:
    """Return what the first of `BUILT_IN` makes that has this function; None where none has it, or all return None."""
    for name in BUILT_IN:
        make = getattr(import_module(name), function, None)
        made = None if make is None else make(*given)
        if made is not None:
            return made
    return None
