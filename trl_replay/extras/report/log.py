"""A trainer's log: where it is on disk. Anybody may have written such a file."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.discovery import last_complete_checkpoint
from ...checkpoint.save_id import FOLDER, TRAINER_STATE
from ...errors import ReplayError
from ..advice.logged import COUNTED_STEP, DEAD, DEAD_EXACT, SUM, Log, numbers

HOW_TO_MAKE_ONE = "json.dump(trainer.state.log_history, open('log.json', 'w')) after training"
PRINTED = re.compile(r"\{'[^{}]*\}")
"""An entry as a trainer prints it."""
PAIR = re.compile(r"'([^']+)': *(?:'([^']*)'|([^,}]+))")
STEPS = ("step", "train/global_step", "global_step", "global_step/max_steps", "_step", "Step")
"""Names of the step in trainers' and trackers' logs; ms-swift's is a text, `"9/547"`."""
RUN = " - "
"""In a chart of W&B, between the name of a run and that of a metric."""
SPREAD = ("__MIN", "__MAX")
"""Endings of a chart's columns beside a metric's own."""


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run's folder; the path itself where there is none."""
    found = last_complete_checkpoint(path) if path.is_dir() else None
    return path if found is None else Path(found)


def buffer_in(path: Path) -> Path:
    """Return the checkpoint itself where it holds a buffer, or the newest complete one of a run's folder; of a
    trainer's state, those of its folder."""
    _require(path)
    folder = path.parent if path.name == TRAINER_STATE else path
    return folder if (folder / FOLDER).is_dir() else newest(folder)


def _require(path: Path) -> None:
    if not path.exists():
        raise ReplayError(f"{path} does not exist: give a run's output_dir or one of its checkpoints.")


def read_log(path: Path) -> list[Mapping[str, Any]]:
    """The entries of the log in a trainer's state; in that of a run's folder or of its newest complete checkpoint,
    whichever goes further; or in a file of metrics by step: a JSON list, JSONL, or CSV, as trackers export them.

    Raises:
        ReplayError: There is none, or it can't be read.
    """
    _require(path)
    states = {path / TRAINER_STATE, newest(path) / TRAINER_STATE} if path.is_dir() else {path}
    logs = [_read(state) for state in sorted(states) if state.is_file()]
    if not logs:
        raise ReplayError(
            f"{path} holds neither {TRAINER_STATE} nor a complete checkpoint: there is no log to read. Give a run's "
            f"output_dir, one of its checkpoints, or a file of its metrics: {HOW_TO_MAKE_ONE}."
        )
    return max(logs, key=_last_step)


def _last_step(log: Log) -> float:
    return max(numbers(log, "step"), default=0.0)


def _read(state: Path) -> list[Mapping[str, Any]]:
    try:
        return [_plain(entry) for entry in _entries(state) if isinstance(entry, Mapping)]
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise ReplayError(
            f"{state} holds no log of a trainer: {type(error).__name__}: {error}. To make one: {HOW_TO_MAKE_ONE}."
        ) from error


def _entries(path: Path) -> list[Any]:
    """The entries of a file, by its ending."""
    text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a byte-order mark
    ending = path.suffix.lower()
    if ending == ".csv":
        return _of_table(text.splitlines())
    if ending == ".json":
        return _of_json(text)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return _of_json(text)
    lines = text.splitlines()
    with contextlib.suppress(ValueError):
        if entries := _of_lines(lines):
            return entries
    return _of_output(text) or _of_lines(lines)


def _of_output(text: str) -> list[Any]:
    """The entries among what a run printed, as Python writes them: `{'loss': 0.1, …}`, with numbers or texts. They are
    counted where they name no step."""
    found = [
        {name: _cell(text or word) for name, text, word in PAIR.findall(entry)} for entry in PRINTED.findall(text)
    ]
    entries = [entry for entry in found if entry.keys() & {DEAD, DEAD_EXACT, SUM}]
    if any(entry.get(name) is not None for entry in entries for name in STEPS):
        return entries
    return [{**entry, "step": number, COUNTED_STEP: 1.0} for number, entry in enumerate(entries, 1)]


def _cell(text: str) -> float | str:
    number = _number(text)
    return text if number is None else number


def _of_table(lines: Sequence[str]) -> list[Any]:
    """The entries of a table with a column a metric: a tracker's, or one of its charts, of one run."""
    table = csv.DictReader(lines)
    names = {column: column.rpartition(RUN)[2] for column in table.fieldnames or () if not column.endswith(SPREAD)}
    runs = {column.rpartition(RUN)[0] for column in names if RUN in column}
    if len(runs) > 1:
        raise ReplayError(f"This chart has several runs ({', '.join(sorted(runs))}): export it with one of them.")
    return [{name: _number(row[column]) for column, name in names.items()} for row in table]


def _of_json(text: str) -> list[Any]:
    """The entries of a list, or of a trainer's state."""
    found = json.loads(text)
    return found if isinstance(found, list) else found["log_history"]


def _of_lines(lines: Sequence[str]) -> list[Any]:
    """The entries of JSONL, of which a run that was killed may have left the last line short."""
    *complete, last = [line for line in lines if line.strip()] or [""]
    entries = [json.loads(line) for line in complete]
    with contextlib.suppress(json.JSONDecodeError):
        entries.append(json.loads(last))
    return entries


def _number(text: str | None) -> float | None:
    """A cell as a number; None if it is none."""
    try:
        return float(text or "")
    except ValueError:
        return None


def _step(value: Any) -> Any:
    """A step as a number, where a text tells it before the number of all steps."""
    return _number(value.partition("/")[0]) if isinstance(value, str) else value


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the names that the trainer logs."""
    steps = [_step(entry[name]) for name in STEPS if entry.get(name) is not None]
    plain = {str(name).removeprefix("train/"): value for name, value in entry.items() if value is not None}
    return {**plain, "step": steps[0]} if steps else plain
