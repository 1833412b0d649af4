"""What is in a checkpoint's buffer: numbers for `trl-replay inspect` and for the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import format as saved
from ..errors import CheckpointError
from ..offline.export import PORTION, Source, of_checkpoint, rows_of
from ..sizes import format_bytes

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
    folder = Path(checkpoint) / saved.FOLDER
    states = [saved.read(folder, rank) for rank in saved.ranks_in(folder)]
    if not states:
        raise CheckpointError(f"{checkpoint} holds no replay buffer.")
    own = [state for state in states if not _is_copy(state, states)]
    columns = {name: np.concatenate([state.columns[name] for state in own]) for name in own[0].columns}
    first = states[0]
    update, serials = first.session["update"], columns["serial"]
    return {
        "checkpoint": str(checkpoint),
        "update": update,
        "scope": first.identity.scope,
        "processes": first.identity.processes,
        "num_generations": first.identity.num_generations,
        "groups": len(serials),
        "bytes": int(columns["nbytes"].sum()),
        "waiting": max(len(state.pending.candidates) if state.pending else 0 for state in states),
        "age": summary(update - columns["step"]),
        "uses": summary(columns["uses"]),
        "score": summary(columns["score"]),
        "pass_rate": summary(columns["reward_mean"]),
        "completion_tokens": summary(columns["tokens"]),
        "columns": {
            "age": (update - columns["step"]).tolist(),
            "uses": columns["uses"].tolist(),
            "score": columns["score"].tolist(),
            "pass_rate": columns["reward_mean"].astype(float).tolist(),
        },
        **_extremes(of_checkpoint(checkpoint), update, shown),
    }


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


def facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers in words, for a table."""
    rows = [
        ("update", str(found["update"])),
        (
            "groups",
            f"{found['groups']} of {found['num_generations']} completions, and {found['waiting']} waiting",
        ),
        ("payload", format_bytes(found["bytes"])),
        (
            "scope",
            f"{found['scope']}, number of processes {found['processes']}",
        ),
    ]
    for name, words in (
        ("age", "age in updates"),
        ("uses", "uses"),
        ("score", "score"),
        ("pass_rate", "mean reward"),
        ("completion_tokens", "completion tokens"),
    ):
        told = found[name]
        if told is not None:
            rows.append(
                (
                    words,
                    ", ".join(f"{key} {value:.4g}" for key, value in told.items()),
                )
            )
    return rows


def _is_copy(state: saved.RankState, states: Sequence[saved.RankState]) -> bool:
    """Whether an earlier rank's table is the same: one buffer that several ranks share."""
    earlier = states[: list(states).index(state)]
    return any(
        np.array_equal(state.columns["serial"], other.columns["serial"])
        and np.array_equal(state.columns["tag"], other.columns["tag"])
        for other in earlier
        if len(state.columns["serial"])
    )


def _extremes(source: Source, update: int, shown: int) -> dict[str, list[dict[str, Any]]]:
    """The entries with the highest and the lowest scores, with their texts; no others stay in memory."""
    ranked: list[tuple[float, int, Any]] = []
    for number, entry in enumerate(source.entries):
        ranked.append((-entry.columns["score"], number, entry))
        if len(ranked) > 2 * shown + PORTION:
            ranked.sort(key=lambda told: told[:2])
            del ranked[shown : len(ranked) - shown]
    ranked.sort(key=lambda told: told[:2])
    top, bottom = ranked[:shown], ranked[shown:][-shown:] if shown else []
    return {
        name: [_told(number, entry, source, update) for _, number, entry in part]
        for name, part in (("top", top), ("bottom", bottom))
    }


def _told(number: int, entry: Any, source: Source, update: int) -> dict[str, Any]:
    rows = list(rows_of(number, entry, source))
    return {
        "prompt": rows[0]["prompt"],
        "score": entry.columns["score"],
        "age": update - entry.columns["step"],
        "uses": entry.columns["uses"],
        "mean_reward": entry.columns["reward_mean"],
        "completions": [{"text": row["completion"], "advantage": row["advantage"]} for row in rows],
    }
