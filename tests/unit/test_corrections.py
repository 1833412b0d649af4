"""Corrections by hand."""

import math

import pytest
import torch
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
