"""What is in a checkpoint's buffer: numbers for `trl-replay inspect` and for the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import format as saved
from ..checkpoint.save_id import FOLDER
from ..errors import CheckpointError
from ..offline.export import PORTION, Source, StoredEntry, of_checkpoint, rows_of
from ..sizes import counted, format_bytes

Columns: TypeAlias = dict[str, NDArray[Any]]
SUMMARIZED = {
    "age": "age in updates",
    "uses": "uses",
    "score": "score",
    "mean_reward": "mean reward",
    "completion_tokens": "completion tokens",
}
"""What is summarized, and in which words `trl-replay inspect` names it."""
SHOWN = 3
"""Entries that are shown with their texts from the top and from the bottom."""


def inspect(checkpoint: str | Path, shown: int = SHOWN) -> dict[str, Any]:
    """Everything that `trl-replay inspect` prints, as plain values.

    Args:
        checkpoint (`str` or `Path`): Folder of a checkpoint.
        shown (`int`, *optional*, defaults to `3`): Entries with the highest and with the lowest scores to be shown.

    Raises:
        CheckpointError: It holds no buffer, or a damaged one.
    """
    folder = Path(checkpoint) / FOLDER
    states = [saved.read(folder, rank) for rank in saved.ranks_in(folder)]
    if not states:
        raise CheckpointError(f"{checkpoint} holds no replay buffer.")
    columns = _columns(states)
    identity = states[0].identity
    update = _count(states[0].session["update"], "update", folder)
    age = update - columns["update"]
    mean_reward = columns["reward_mean"].astype(float)
    source = of_checkpoint(checkpoint)
    return {
        "checkpoint": str(checkpoint),
        "update": update,
        "settings": _settings(states[0].session.get("settings")),
        "scope": str(identity.scope),
        "processes": _count(identity.processes, "processes", folder),
        "num_generations": _count(identity.num_generations, "num_generations", folder),
        "groups": len(columns["serial"]),
        "bytes": int(columns["nbytes"].sum()),
        "waiting": max(_waiting(state) for state in states),
        "age": summary(age),
        "uses": summary(columns["uses"]),
        "score": summary(columns["score"]),
        "mean_reward": summary(mean_reward),
        "completion_tokens": summary(columns["tokens"]),
        "columns": {
            "age": age.tolist(),
            "uses": columns["uses"].tolist(),
            "score": columns["score"].tolist(),
            "mean_reward": mean_reward.tolist(),
        },
        **_extremes(source, update, shown),
    }


def _settings(kept: Any) -> dict[str, Any]:
    """The settings that the checkpoint was made with; nothing from releases that did not keep them."""
    return dict(kept) if isinstance(kept, Mapping) else {}


def _count(value: Any, name: str, folder: Path) -> int:
    """A number from JSON, which may hold anything in its place."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise CheckpointError(f"{folder} can't be read: {name} is {value!r}, not a count.")
    return value


def _columns(states: Sequence[saved.RankState]) -> Columns:
    """The tables of all ranks as one; of a buffer that several ranks share, once."""
    tables: list[Columns] = []
    for state in states:
        if not any(_same_table(state.columns, table) for table in tables):
            tables.append(state.columns)
    joined = {}
    for name in tables[0]:
        joined[name] = np.concatenate([table[name] for table in tables])
    return joined


def _same_table(one: Columns, other: Columns) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in ("serial", "tag"))


def _waiting(state: saved.RankState) -> int:
    """Candidates that have not settled."""
    return len(state.pending.candidates) if state.pending else 0


def summary(values: NDArray[Any]) -> dict[str, float] | None:
    """Least, median, mean and greatest; None without values."""
    if len(values) == 0:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    return {
        "least": float(numbers.min()),
        "median": float(np.median(numbers)),
        "mean": float(numbers.mean()),
        "greatest": float(numbers.max()),
    }


def facts(inspected: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers in words, for a table."""
    groups = inspected["groups"]
    size = inspected["num_generations"]
    waiting = inspected["waiting"]
    rows = [
        ("update", str(inspected["update"])),
        ("groups", f"{groups} of {counted(size, 'completion')}, and {waiting} waiting"),
        ("payload", format_bytes(inspected["bytes"])),
        ("scope", f"{inspected['scope']}, {counted(inspected['processes'], 'process', 'processes')}"),
    ]
    for name, words in SUMMARIZED.items():
        numbers = inspected[name]
        if numbers is not None:
            rows.append((words, _in_words(numbers)))
    return rows


def _in_words(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _extremes(source: Source, update: int, shown: int) -> dict[str, list[dict[str, Any]]]:
    """The entries with the highest and the lowest scores, with their texts; no others stay in memory."""
    ranked: list[_Ranked] = []
    for number, entry in enumerate(source.entries):
        ranked.append(_Ranked(-entry.columns["score"], number, entry))
        if len(ranked) > 2 * shown + PORTION:
            ranked.sort(key=_order)
            del ranked[shown : len(ranked) - shown]
    ranked.sort(key=_order)
    top = ranked[:shown]
    bottom = ranked[shown:][-shown:] if shown else []
    return {
        "top": [_shown_entry(entry, source, update) for entry in top],
        "bottom": [_shown_entry(entry, source, update) for entry in bottom],
    }


class _Ranked(NamedTuple):
    """An entry and its place: by falling score, then in the order of the file."""

    minus_score: float
    number: int
    entry: StoredEntry


def _order(ranked: _Ranked) -> tuple[float, int]:
    return ranked.minus_score, ranked.number


def _shown_entry(ranked: _Ranked, source: Source, update: int) -> dict[str, Any]:
    columns = ranked.entry.columns
    rows = list(rows_of(ranked.number, ranked.entry, source))
    completions = [{"text": row["completion"], "advantage": row["advantage"]} for row in rows]
    return {
        "prompt": rows[0]["prompt"],
        "score": columns["score"],
        "age": update - columns["update"],
        "uses": columns["uses"],
        "mean_reward": columns["reward_mean"],
        "completions": completions,
    }
