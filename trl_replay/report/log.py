"""A trainer's log: where it is on disk. Anybody may have written such a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.discovery import last_complete_checkpoint
from ..checkpoint.save_id import FOLDER, TRAINER_STATE
from ..errors import ReplayError


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run's folder; the path itself where there is none."""
    found = last_complete_checkpoint(path) if path.is_dir() else None
    return path if found is None else Path(found)


def buffer_in(path: Path) -> Path:
    """Return the checkpoint itself where it holds a buffer, or the newest complete one of a run's folder."""
    _require(path)
    return path if (path / FOLDER).is_dir() else newest(path)


def _require(path: Path) -> None:
    if not path.exists():
        raise ReplayError(f"{path} does not exist: give a run's output_dir or one of its checkpoints.")


def read_log(path: Path) -> list[Mapping[str, Any]]:
    """The entries of the log in a trainer's state, or in that of a run's folder or its newest complete checkpoint.

    Raises:
        ReplayError: There is none, or it can't be read.
    """
    _require(path)
    if path.is_dir():
        in_run = path / TRAINER_STATE
        state = in_run if in_run.is_file() else newest(path) / TRAINER_STATE
    else:
        state = path
    if not state.is_file():
        raise ReplayError(
            f"{path} holds neither {TRAINER_STATE} nor a complete checkpoint: there is no log to read. Give a run's "
            "output_dir or one of its checkpoints."
        )
    try:
        history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        return [entry for entry in history if isinstance(entry, Mapping)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReplayError(f"{state} holds no log of a trainer: {type(error).__name__}: {error}") from error
