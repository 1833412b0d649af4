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


RATIOS = [[0.5, 2.0, 7.0], [4.0, 1.0, 1.0]]
MASK = [[1, 1, 0], [1, 0, 1]]
ADVANTAGES = [-1.5, 2.0]


WEIGHTS = {"replay/weight_positive", "replay/weight_negative"}


def filled():
    stats = OffPolicyStats()
    stats.add(rows(RATIOS, MASK, ADVANTAGES), None)
    return stats


def test_the_metrics_are_means_over_tokens_and_shares_of_rows():
    stats = filled()
    stats.add(rows([[1.0], [1.0]], [[1], [1]], [1.0, 1.0]), torch.tensor([0.0, 0.5]))
    metrics = metrics_of(stats)
    assert metrics["replay/ratio_mean"] == pytest.approx((2.5 + 5.0 + 2.0) / 6)
    assert metrics["replay/ess"] == pytest.approx(9.5**2 / (6 * (4.25 + 17.0 + 2.0)))
    assert metrics["replay/drift_mean"] == pytest.approx(4 * math.log(2) / 6)
    assert metrics["replay/gated_fraction"] == 0.25
    assert metrics_of(stats) == {}, "told once"


def test_weights_are_means_over_trained_tokens_by_the_sign_of_an_advantage():
    stats = filled()
    assert not WEIGHTS & metrics_of(stats).keys(), "a correction that gives none leaves it to the loss"
    stats.add(rows(RATIOS, MASK, ADVANTAGES), torch.tensor([0.25, 1.0]))
    stats.add(rows(RATIOS, MASK, ADVANTAGES), torch.tensor([[0.5, 0.0, 9.0], [1.0, 9.0, 2.0]]))
    found = metrics_of(stats)
    assert found["replay/weight_negative"] == pytest.approx((0.25 + 0.25 + 0.5 + 0.0) / 4)
    assert found["replay/weight_positive"] == pytest.approx((1.0 + 1.0 + 1.0 + 2.0) / 4)
    stats.add(rows(RATIOS, MASK, [[-1.0, 1.0, 0.0]] * 2), torch.tensor([0.5, 0.25]))
    found = metrics_of(stats)
    assert (found["replay/weight_negative"], found["replay/weight_positive"]) == (0.375, 0.5)
    stats.add(rows(RATIOS, MASK, [0.0, 1.0]), torch.tensor([1.0, 1.0]))
    assert WEIGHTS & metrics_of(stats).keys() == {"replay/weight_positive"}


def test_138_a_row_is_gated_whose_trained_tokens_have_no_weight_whatever_its_padding_has():
    far = rows([[9.0, 9.0, 1.0], [9.0, 9.0, 9.0]], [[1, 1, 0], [1, 1, 1]], ADVANTAGES)
    weights = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.5]])
    stats = OffPolicyStats()
    stats.add(far, weights)
    assert metrics_of(stats)["replay/gated_fraction"] == 0.5


@pytest.mark.parametrize("weights", [None, torch.tensor([0.0])])
def test_without_a_trained_token_there_is_a_share_and_no_mean(weights):
    stats = OffPolicyStats()
    stats.add(rows([[2.0]], [[0]], [1.0]), weights)
    assert metrics_of(stats) == {"replay/gated_fraction": 0.0}
    assert metrics_of(OffPolicyStats()) == {}


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
