"""Statistics of replayed rows, by hand: metrics since the last log."""

import math

import pytest
import torch
from fetched import metrics_of

from trl_replay import ReplayedRows
from trl_replay.loss.supply import OffPolicyStats


def test_huge_log_ratios_are_bounded():
    stats = OffPolicyStats()
    far = ReplayedRows(
        torch.tensor([[300.0, -300.0]]), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.ones(1),
        torch.ones(1),
    )  # fmt: skip
    stats.add(far, None)
    metrics = metrics_of(stats)
    assert metrics["replay/drift_mean"] == 20.0
    assert metrics["replay/ratio_mean"] == pytest.approx(math.exp(20) / 2)
