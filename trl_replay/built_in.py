"""What the package has beside its core, named by modules: nothing below the command line imports one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

BUILT_IN = ("trl_replay.extras.files.session_files", "trl_replay.extras.outcome.advice")
"""Modules that have one of these functions: `make_session(trainer, settings)` ([`AttachedSession`]),
`make_dialect(trainer)` ([`Dialect`]), `make_files(session)` ([`SessionFiles`]), `make_advisor()` ([`Advisor`])."""


TRAINERS = "trl_replay.trainers"
"""Entry points of distributions for other trainers, which name modules with `make_session` or `make_dialect`."""


@cache
def _installed() -> tuple[str, ...]:
    return tuple(point.value for point in entry_points(group=TRAINERS))


def ask_built_in(function: str, *given: Any) -> Any:
    """Return what the first of `BUILT_IN` and of what is installed for `TRAINERS` makes that has this function; None
    where none has it, or all return None."""
    for name in (*BUILT_IN, *_installed()):
        make = getattr(import_module(name), function, None)
        made = None if make is None else make(*given)
        if made is not None:
            return made
    return None
