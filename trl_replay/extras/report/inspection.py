"""The contents of a checkpoint's buffer, for the report page."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoint import format as saved
from ...checkpoint.save_id import FOLDER
from ...data.types import Floats
from ...errors import CheckpointError
from ...setup.config import ReplayConfig
from ..advice.logged import DEAD_EXACT, Log
from ..advice.rules import GENERATIONS, Advice, advise
from ..files.export import Source, StoredEntry, of_checkpoint, rows_of
from .log import buffer_in

SUMMARIZED = {
    "age": "age in updates",
    "uses": "times replayed",
    "score": "score",
    "mean_reward": "mean reward",
    "completion_tokens": "tokens",
}
"""Summarized numbers, and their names in words."""
SUMMARY: dict[str, Callable[[Floats], Any]] = {
    "least": np.min,
    "median": np.median,
    "mean": np.mean,
    "greatest": np.max,
}
GROUPS_SHOWN = 3
"""Entries that are shown with their texts."""


def inspect(checkpoint: str | Path, shown: int = GROUPS_SHOWN) -> dict[str, Any]:
    """Return what the page shows of a buffer, as plain values.

    Args:
        checkpoint (`str` or `Path`): Folder of a checkpoint.
        shown (`int`, *optional*, defaults to `3`): Entries with the highest scores to be shown.

    Raises:
        CheckpointError: It holds no buffer, or a damaged one.
    """
    states = saved.read_all(checkpoint)
    columns = _columns(states)
    identity = states[0].identity
    update = states[0].session["update"]
    summarized = {
        "age": update - columns["update"],
        "uses": columns["uses"],
        "score": columns["score"],
        "mean_reward": columns["reward_mean"].astype(float),
        "completion_tokens": columns["tokens"],
    }
    return {
        "checkpoint": str(checkpoint),
        "update": update,
        "settings": dict(states[0].session["settings"]),
        "scope": str(identity.scope),
        "processes": identity.processes,
        "num_generations": identity.num_generations,
        "groups": len(columns["serial"]),
        "bytes": int(columns["nbytes"].sum()),
        "waiting": max(len(state.pending.candidates) if state.pending else 0 for state in states),
        **{name: summary(column) for name, column in summarized.items()},
        "top": _highest(of_checkpoint(checkpoint), update, shown),
    }


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings of the run whose checkpoint this is, or whose newest complete one is in this folder, with
    its `num_generations`; none where no buffer was saved, or where it can't be read."""
    checkpoint = buffer_in(run)
    if not (checkpoint / FOLDER).is_dir():
        return {}
    try:
        state = saved.read_all(checkpoint)[0]
        return {**state.session["settings"], GENERATIONS: state.identity.num_generations}
    except CheckpointError:
        return {}


def advice_on(log: Log, settings: Mapping[str, Any]) -> tuple[str, list[Advice]]:
    """Return which steps advice is about, in words, and what to change in a run with these settings; without any,
    what holds whatever they are."""
    are_known = bool(settings.keys() - {GENERATIONS})
    about, found = advise(log, {**ReplayConfig().to_dict(), **settings} if are_known else settings)
    if not are_known and any(DEAD_EXACT in entry for entry in log):
        about += "; the settings are not known, so rules that need them are left out"
    return about, found


def _columns(states: Sequence[saved.RankState]) -> dict[str, NDArray[Any]]:
    """The tables of all ranks as one; of a buffer that several ranks share, once."""
    tables = list({state.columns["tag"].tobytes(): state.columns for state in states}.values())
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def summary(values: NDArray[Any]) -> dict[str, float] | None:
    """Least, median, mean and greatest; None without values."""
    numbers = np.asarray(values, np.float64)
    return {name: float(of(numbers)) for name, of in SUMMARY.items()} if len(numbers) else None


def _highest(source: Source, update: int, shown: int) -> list[dict[str, Any]]:
    """The entries with the highest scores, with their texts; no others stay in memory."""
    highest = heapq.nlargest(shown, enumerate(source.entries), key=lambda numbered: numbered[1].columns["score"])
    return [_shown_entry(number, entry, source, update) for number, entry in highest]


def _shown_entry(number: int, entry: StoredEntry, source: Source, update: int) -> dict[str, Any]:
    columns = entry.columns
    rows = list(rows_of(number, entry, source))
    completions = [{"text": row["completion"], "advantage": row["advantage"]} for row in rows]
    return {
        "prompt": rows[0]["prompt"],
        "score": columns["score"],
        "age": update - columns["update"],
        "uses": columns["uses"],
        "mean_reward": columns["reward_mean"],
        "completions": completions,
    }
