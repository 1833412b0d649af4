"""Rows that were made elsewhere."""

from __future__ import annotations

from typing import Any


def rows_of(prompt: Any, completions: list[Any], rewards: list[float]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": c, "reward": r} for c, r in zip(completions, rewards, strict=True)]


TEACHER = rows_of("1+1=", ["2", "3", "4", "5"], [1, 0, 0, 0]) + rows_of("2+2=", ["4", "4", "5", "6"], [1, 1, 0, 0])
