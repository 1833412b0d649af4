"""Replayed rows with given ratios, and corrections by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from trl_replay import ReplayedRows
from trl_replay.registry import registry


def rows_of(logs: list[list[float]], advantages: list[float], length: int = 4) -> ReplayedRows:
    """Replayed rows whose log ratios are given; the last position of each is padding."""
    ratios = torch.tensor([[*log, 0.0] for log in logs])
    behavior = torch.full_like(ratios, -1.5)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    mask[:, -1] = False
    new = behavior + ratios
    return ReplayedRows(new, behavior, new, mask, torch.tensor(advantages), torch.ones(len(logs), dtype=torch.int64))


def made(name: str, **kwargs: Any) -> Any:
    return registry().resolve("correction", name, kwargs).make()


def log(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]
