"""Statistics of replayed rows, by hand: metrics since the last log."""

import math

import pytest
import torch
from fetched import metrics_of

from trl_replay import ReplayedRows
from trl_replay.loss.supply import OffPolicyStats


def rows(ratios, mask, advantages):
    """Replayed rows with these importance ratios."""
    logs = torch.tensor(ratios).log()
    behavior = torch.full_like(logs, -1.0)
    ages = torch.ones(len(ratios), dtype=torch.int64)
    new = behavior + logs
    return ReplayedRows(new, behavior, new, torch.tensor(mask).bool(), torch.tensor(advantages), ages)


def test_138_a_row_is_gated_whose_trained_tokens_have_no_weight_whatever_its_padding_has():
    far = rows([[9.0, 9.0, 1.0], [9.0, 9.0, 9.0]], [[1, 1, 0], [1, 1, 1]], [-1.5, 2.0])
    weights = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.5]])
    stats = OffPolicyStats()
    stats.add(far, weights)
    assert metrics_of(stats)["replay/gated_fraction"] == 0.5


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
