"""Rows that were made elsewhere."""

from __future__ import annotations

from typing import Any


def rows_of(prompt: Any, completions: list[Any], rewards: list[float]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": c, "reward": r} for c, r in zip(completions, rewards, strict=True)]


TEACHER = rows_of("1+1=", ["2", "3", "4", "5"], [1, 0, 0, 0]) + rows_of("2+2=", ["4", "4", "5", "6"], [1, 1, 0, 0])
IDS: dict[str, Any] = {"prompt_ids": [4, 5], "completion_ids": [6, 7], "old_per_token_logps": [-1.0, -2.0]}
"""Token ids and log-probs of a row."""


def rows(**columns: Any) -> list[dict[str, Any]]:
    """Four completions of one prompt, the first one right; `columns` are the same in every row."""
    return [{"prompt": "1=", "completion": c, "reward": float(c == "2"), **columns} for c in "2345"]
