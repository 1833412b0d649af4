"""Where a run's log is, and how it is read. Anybody may have written such a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, TypeAlias

from ...checkpoint import format as saved
from ...checkpoint.discovery import last_complete_checkpoint
from ...checkpoint.save_id import FOLDER, TRAINER_STATE
from ...errors import CheckpointError, ReplayError

Entry: TypeAlias = Mapping[str, float]
"""An entry of a log: numbers by name, NaN included."""
READ = (
    f"Give a run's output_dir, one of its checkpoints, or {TRAINER_STATE}; or a table of its metrics by step, as "
    ".csv, .jsonl, .json, or .parquet. What a program printed is not read. To make a table: "
    "json.dump(trainer.state.log_history, open('log.json', 'w')) after training."
)
STEPS = ("step", "train/global_step", "global_step", "global_step/max_steps", "_step", "Step")
"""Names of the step in logs of trainers and trackers; ms-swift's is a text, `"9/547"`."""

LARGEST = 2**53
"""What is larger has no place on an axis."""


def read_log(path: Path) -> tuple[list[Entry], int]:
    """Return the entries of the last run in a log, and how many runs it has.

    Args:
        path (`Path`): A run's folder, one of its checkpoints, or a file. Of a folder and its newest complete
            checkpoint, the state that goes further is read.

    Raises:
        ReplayError: There is no log, or it can't be read.
    """
    if not path.exists():
        raise ReplayError(f"{path} does not exist. {READ}")
    states = [path / TRAINER_STATE, newest(path) / TRAINER_STATE] if path.is_dir() else [path]
    logs = [_read(state) for state in dict.fromkeys(states) if state.is_file()]
    if not logs:
        raise ReplayError(f"{path} holds neither {TRAINER_STATE} nor a complete checkpoint. {READ}")
    runs = _apart(max(logs, key=lambda log: max((entry.get("step", 0.0) for entry in log), default=0.0)))
    return runs[-1], len(runs)


def newest(path: Path) -> Path:
    """Return the newest complete checkpoint of a run's folder; the path itself where there is none."""
    return Path(last_complete_checkpoint(path) or path) if path.is_dir() else path


def checkpoint_of(path: Path) -> Path:
    """Return the folder itself where it holds a buffer, or the newest complete checkpoint in it; of a trainer's state,
    those of its folder.

    Raises:
        ReplayError: There is nothing at this path.
    """
    if not path.exists():
        raise ReplayError(f"{path} does not exist: give a run's output_dir or one of its checkpoints.")
    folder = path.parent if path.name == TRAINER_STATE else path
    return folder if (folder / FOLDER).is_dir() else newest(folder)


def states_of(path: Path) -> Sequence[saved.RankState]:
    """Return what each rank saved with the log at this path; nothing where no buffer was saved, or can't be read."""
    checkpoint = checkpoint_of(path)
    try:
        return saved.read_all(checkpoint) if (checkpoint / FOLDER).is_dir() else []
    except CheckpointError:
        return []


def _read(path: Path) -> list[Entry]:
    try:
        rows = _rows(path)
        if not isinstance(rows, list):
            raise TypeError(f"its entries are no list, but {type(rows).__name__}")
        return [plain(row) for row in rows if isinstance(row, Mapping)]
    except KeyError as error:
        raise ReplayError(f"{path} can't be read: it has no {error}. {READ}") from error
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ReplayError(f"{path} can't be read: {str(error).rstrip('.')}. {READ}") from error


def _rows(path: Path) -> Any:
    """The rows of a file, by its ending."""
    ending = path.suffix.lower()
    if ending == ".json":
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        return found["log_history"] if isinstance(found, Mapping) else found
    import pandas

    if ending == ".csv":
        return pandas.read_csv(path).to_dict("records")
    if ending == ".jsonl":
        return pandas.read_json(path, lines=True).to_dict("records")
    if ending == ".parquet":
        return pandas.read_parquet(path).to_dict("records")
    raise ValueError(f"files that end in {ending or 'nothing'!r} are not read")


def plain(row: Mapping[str, Any]) -> Entry:
    """Return an entry with the names that the trainer logs, and its numbers alone; what is huge is NaN."""
    steps = [step for name in STEPS if (step := _step(row.get(name))) is not None]
    values = {str(name).removeprefix("train/"): value for name, value in row.items() if type(value) in (int, float)}
    plain = {name: float(value) if abs(value) < LARGEST else nan for name, value in values.items()}
    return {**plain, "step": steps[0]} if steps else plain


def _step(value: Any) -> float | None:
    """A step as a number, where a text tells it before the number of all steps."""
    try:
        step = float(value.partition("/")[0] if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return step if abs(step) < LARGEST else None


def _apart(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The runs of a log: one begins where the step is back at the first. Where it is back elsewhere, training was
    resumed, and what stood beyond is gone."""
    runs: list[list[Entry]] = [[]]
    first = last = 0.0
    for entry in entries:
        step = entry.get("step", last)
        if step < last and step <= first:
            runs.append([])
        elif step < last:
            runs[-1] = [earlier for earlier in runs[-1] if earlier.get("step", 0.0) < step]
        first = first if any("step" in earlier for earlier in runs[-1]) else step
        last = step
        runs[-1].append(entry)
    return runs
