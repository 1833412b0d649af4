"""A trainer's log: where it is, and the numbers in it. Anybody may have written such a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from ..checkpoint.discovery import last_complete_checkpoint
from ..checkpoint.save_id import FOLDER, TRAINER_STATE
from ..errors import ReplayError

Log: TypeAlias = Sequence[Mapping[str, Any]]
"""Its entries: metrics by name."""
DEAD = "frac_reward_zero_std"
"""TRL's share of dead groups; a run with replay has an exacter one."""
DEAD_EXACT = "replay/dead_fraction"
LARGEST = 2**53
"""Numbers beyond it have no place on an axis."""


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run's folder; the path itself where there is none."""
    found = last_complete_checkpoint(path) if path.is_dir() else None
    return path if found is None else Path(found)


def buffer_in(path: Path) -> Path:
    """Return the checkpoint itself where it holds a buffer, or the newest complete one of a run's folder."""
    return path if (path / FOLDER).is_dir() else newest(path)


def read_log(path: Path) -> list[Mapping[str, Any]]:
    """The entries of the log in a trainer's state, or in that of a run's folder or its newest complete checkpoint.

    Raises:
        ReplayError: There is none, or it can't be read.
    """
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


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value can be drawn: neither a text nor NaN, infinite or huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def points(log: Log, key: str) -> list[tuple[float, float]]:
    """`(step, value)` wherever the log holds numbers."""
    return [(entry["step"], entry[key]) for entry in log if is_number(entry.get("step")) and is_number(entry.get(key))]


def mean(log: Log, key: str) -> float | None:
    """Of the values of a metric; None without any."""
    values = [entry[key] for entry in log if is_number(entry.get(key))]
    return float(np.mean(values)) if values else None
