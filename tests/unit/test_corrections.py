"""Corrections by hand."""

import math

import pytest
import torch
from corrected import CORRECTIONS
from replayed_rows import log, made, rows_of

from trl_replay.testing import make_context


def test_truncated_at_sequence_level_gives_one_weight_a_row():
    rows = rows_of([[0.1, 0.2, 0.3], [-0.5, -0.5, 0.1]], [1.0, -1.0])
    corrected = made("truncated", cap=1.5, level="sequence")(rows, make_context())
    torch.testing.assert_close(corrected.weights, torch.tensor([1.5, math.exp(-0.9)]))


@pytest.mark.parametrize(
    ("limits", "weights"), [({}, [1, 0, 1]), ({"low": 0.98, "high": 1.01}, [0, 0, 1]), ({"high": 3.0}, [1, 1, 1])]
)
def test_a_row_is_masked_by_the_geometric_mean_of_its_ratios(limits, weights):
    logs = [log(1.02, 1.02, 1.0), log(9.0, 2.0, 1.0), log(2.0, 0.5, 1.0)]  # 1.0133, 2.62, 1
    corrected = made("sequence_mask", **limits)(rows_of(logs, [1.0, -1.0, 1.0]), make_context())
    assert corrected.weights.tolist() == weights


def test_topr_of_a_failure_of_300_tokens_weighs_nothing_and_each_token_nearly_all():
    """Each token got a little less likely: exp(-0.03) of each, exp(-9) of all."""
    rows = rows_of([[-0.03] * 300] * 2, [-1.0, 1.0])
    of_rows, of_tokens = (made("topr", level=level)(rows, make_context()) for level in ("sequence", "token"))
    torch.testing.assert_close(of_rows.weights, torch.tensor([math.exp(-9), 1.0]), atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(of_tokens.weights[rows.mask][:300], torch.full((300,), math.exp(-0.03)))
    assert bool((of_tokens.weights[1] == 1).all())


def test_huge_ratios_stay_finite():
    rows = rows_of([[200.0, -300.0, 90.0], [-500.0, -500.0, -500.0]], [1.0, -1.0])
    for name in CORRECTIONS:
        corrected = made(name)(rows, make_context())
        assert corrected.weights is None or bool(corrected.weights.isfinite().all()), name
