"""M2PO: which tokens of replayed rows are masked, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trl_replay.base.validation import Named
from trl_replay.data.types import ReplayedRows
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_table
from trl_replay_papers.m2po import SETTINGS


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_farthest_off_are_masked_until_the_second_moment_is_small(seed: int) -> Any:
    correct = registry().resolve("correction", *Named.read(SETTINGS["replay_correction"])).make()
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(4, 8, generator=generator)
    behavior = torch.full((4, 8), -2.0)
    mask = torch.ones(4, 8, dtype=torch.bool)
    logps = behavior + drift
    rows = ReplayedRows(logps, behavior, logps, mask, torch.ones(4), torch.zeros(4, dtype=torch.int64))
    kept = correct(rows, make_context(make_table([]))).weights.bool()
    squares = sorted((drift**2).flatten().tolist())
    count = 0
    while sum(squares[: count + 1]) / (count + 1) <= 0.04:
        count += 1
    assert 0 < count < 32
    assert sorted((drift[kept] ** 2).tolist()) == pytest.approx(squares[:count])
