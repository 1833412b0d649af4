"""The corrections of papers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from corrected import MASKS, PAPERS, mask_by_hand
from hypothesis import given, settings
from replayed_rows import log, made, rows_of

from trl_replay import ReplayedRows
from trl_replay.strategies import corrections
from trl_replay.testing import make_context


def test_m2po_masks_the_largest_log_ratios_until_their_second_moment_is_small() -> None:
    rows = rows_of([[0.1, 0.5, -0.1], [0.0, -0.9, 0.2]], [1.0, -1.0])
    corrected = made("m2po", threshold=0.02)(rows, make_context())
    # squares .01 .25 .01 / 0 .81 .04: without .81 and .25 the mean is .06 / 4 = .015
    assert corrected.weights[rows.mask].tolist() == [1, 0, 1, 1, 0, 1]
    assert torch.equal(corrected.old_logps, rows.behavior_logps)
    padding = made("m2po")(rows_of([[2.2, 2.2, 2.2]], [1.0]), make_context()).weights
    assert padding.tolist() == [[0, 0, 0, 1]]
    everything = made("m2po", threshold=1.0)(rows, make_context())
    assert bool((everything.weights[rows.mask] == 1).all())


MEANS = [  # geometric means
    log(2.0, 0.5, 1.0),  # 1
    log(1.02, 1.0, 1.0),  # 1.0066
    log(1.02, 1.02, 1.0),  # 1.0133
    log(0.98, 1.0, 1.0),  # 0.9933
    log(0.98, 0.98, 1.0),  # 0.9866
]
KL = [  # estimated
    log(2.0, 0.5, 1.0),  # (1 - log 2 + -0.5 + log 2 + 0) / 3 = 0.5 / 3, though the ratios cancel
    log(1.1, 0.9, 1.0),  # (0.1 - 0.09531 - 0.1 + 0.10536) / 3 = 0.00335
    log(0.8, 0.8, 0.8),  # -0.2 + 0.22314 = 0.02314
    log(1.2, 1.2, 1.2),  # 0.2 - 0.18232 = 0.01768
    log(1.0, 1.0, 1.0),
]
OUTLIERS = [log(99.0, 1.1e-4, 1.0), log(101.0, 1.0, 1.0), log(1.0, 1.0, 9e-5)]
SINGLE = [log(0.49, 0.51, 1.0), log(1.99, 2.01, 4.9)]
SIGNED = [  # each with a positive and a negative advantage
    *[log(0.1, 0.5, 0.5)] * 2,  # 0.292
    *[log(0.9, 0.5, 0.5)] * 2,  # 0.608
    *[log(9.0, 2.0, 1.0)] * 2,  # 2.62
]
WEIGHTS: list[tuple[str, dict[str, float], list[list[float]], Any]] = [
    ("geo_mask", {}, MEANS, [1, 1, 0, 1, 0]),
    ("geo_mask", {"low": 0.98, "high": 1.01}, MEANS, [1, 1, 0, 1, 1]),
    ("k3_mask", {}, KL, [0, 1, 0, 0, 1]),
    ("k3_mask", {"threshold": 0.0033}, KL, [0, 0, 0, 0, 1]),
    ("k3_mask", {"threshold": 0.02}, KL, [0, 1, 0, 1, 1]),
    ("k3_mask", {"threshold": 0.16}, KL, [0, 1, 1, 1, 1]),
    ("k3_mask", {"threshold": 0.17}, KL, [1, 1, 1, 1, 1]),
    ("icepop", {}, SINGLE, [[0, 1, 1, 0], [1, 0, 0, 0]]),  # the last position is padding
    ("icepop", {"high": 5.0}, SINGLE, [[0, 1, 1, 0], [1, 1, 1, 0]]),
    ("suffix_veto", {"low": 0.5, "high": 2.0}, SINGLE, [[1, 1, 1, 1], [1, 1, 0, 0]]),  # A = 1, A = -1
    ("outlier_mask", {}, OUTLIERS, [1, 0, 0]),
    ("outlier_mask", {"high": 200}, OUTLIERS, [1, 1, 0]),
    ("outlier_mask", {"low": 1e-5}, OUTLIERS, [1, 0, 1]),
    ("veto_negative", {}, SIGNED, [1, 0, 1, 1, 1, 0]),
    ("veto_negative", {"low": 0.25, "high": 1e6}, SIGNED, [1] * 6),
]


@pytest.mark.parametrize(("name", "limits", "logs", "weights"), WEIGHTS)
def test_masks_by_hand_with_their_defaults_and_other_limits(name: str, limits: Any, logs: Any, weights: Any) -> None:
    rows = rows_of(logs, [1.0, -1.0, 1.0, -1.0, 1.0, -1.0][: len(logs)])
    assert made(name, **limits)(rows, make_context()).weights.tolist() == weights


def test_k3_of_tokens_that_hardly_moved_is_not_lost_in_rounding() -> None:
    """x²/2 = 1.25e-9, which exp(x) − 1 − x in single precision makes negative."""
    new, old = torch.tensor([[-5e-5, -1e-4, -5e-5]]), torch.tensor([[-1e-4, -5e-5, -1e-4]])
    rows = ReplayedRows(new, old, new, torch.ones(1, 3, dtype=torch.bool), torch.ones(1), torch.ones(1))
    assert made("k3_mask", threshold=1e-9)(rows, make_context()).weights.tolist() == [0]
    assert made("k3_mask", threshold=1.5e-9)(rows, make_context()).weights.tolist() == [1]


@pytest.mark.parametrize("name", MASKS)
def test_tokens_that_are_not_trained_decide_nothing(name: str) -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    new = torch.tensor([[-1.0, -1.0, -1.0, -1.0], [-1.0] * 4])
    for unseen in (-1.0, -90.0, -math.inf):
        old = torch.where(mask, new, unseen)
        rows = ReplayedRows(new, old, new, mask, torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.int64))
        weights = made(name)(rows, make_context()).weights
        if weights.dim() == 2:
            assert weights[mask].tolist() == [1, 1]
        else:
            assert weights.tolist() == [1, 1]


@pytest.mark.parametrize(("name", "expected"), [("pnpo", [0.2, -0.1, -0.1 / 3]), ("minpro", [0.2, -0.2, -0.3])])
def test_a_prefix_is_one_of_trained_tokens(name: str, expected: list[float]) -> None:
    """Log ratios 0.2, -0.4, 0.1, and one of a token that is not trained between them."""
    rows = rows_of([[0.2, -9.0, -0.4, 0.1]], [-1.0])
    rows = replace(rows, mask=torch.tensor([[True, False, True, True, False]]))
    corrected = made(name)(rows, make_context())
    torch.testing.assert_close((rows.logps - corrected.old_logps)[rows.mask], torch.tensor(expected))


LIMITS: dict[str, st.SearchStrategy[dict[str, float]]] = {
    name: st.fixed_dictionaries({"threshold": st.floats(1e-3, 10.0)})
    if name == "k3_mask"
    else st.fixed_dictionaries({"low": st.floats(0.01, 0.99), "high": st.floats(1.01, 100.0)})
    for name in MASKS
}
LOG_RATIOS = st.lists(st.lists(st.floats(-6.0, 6.0, width=32), min_size=3, max_size=3), min_size=1, max_size=4)


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data(), logs=LOG_RATIOS)
def test_within_its_limits_a_row_or_token_weighs_what_it_does_under_ratio_and_nothing_else(
    name: str, data: st.DataObject, logs: list[list[float]]
) -> None:
    limits = data.draw(LIMITS[name])
    advantages = data.draw(st.lists(st.sampled_from([-1.5, 0.0, 0.5]), min_size=len(logs), max_size=len(logs)))
    rows = rows_of(logs, advantages)
    seen = (rows.logps - rows.behavior_logps).double().exp()
    corrected = made(name, **limits)(rows, make_context())
    assert corrected.old_logps is corrections.ratio(rows, make_context()).old_logps
    weights = corrected.weights.view(len(logs), -1).expand_as(seen)
    for index, advantage in enumerate(advantages):
        expected = mask_by_hand(name, seen[index, :3].tolist(), advantage, **limits)
        assert weights[index, :3].tolist() == expected


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_ratios_of_100_give_no_nan_and_no_infinity(name: str, dtype: torch.dtype) -> None:
    logs = [[100.0] * 3, [-100.0] * 3, [100.0, -100.0, 0.0], [0.0, 0.0, -100.0], [0.0] * 3]
    for sign in (1.0, -1.0):
        made_rows = rows_of(logs, [sign] * 5)
        rows = replace(made_rows, logps=made_rows.logps.to(dtype))
        corrected = made(name)(rows, make_context())
        assert bool(corrected.old_logps.isfinite().all())
        assert corrected.weights.dtype == dtype
        weights = corrected.weights.tolist()
        if name == "icepop":
            assert weights == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
        elif name == "suffix_veto":
            behind = [1, 0, 0, 0] if sign < 0 else [1] * 4
            assert weights == [behind, behind, behind, [1] * 4 if sign > 0 else [1, 1, 1, 0], [1] * 4]
        elif name == "geo_mask":
            assert weights == [0, 0, 1, 0, 1]
        elif name == "veto_negative":
            assert weights == ([0, 0, 1, 0, 1] if sign < 0 else [1] * 5)
        else:
            assert weights == [0, 0, 0, 0, 1]


def test_huge_ratios_stay_finite() -> None:
    rows = rows_of([[200.0, -300.0, 90.0], [-500.0, -500.0, -500.0]], [1.0, -1.0])
    for name in [*PAPERS, "m2po"]:
        corrected = made(name)(rows, make_context())
        assert corrected.weights is None or bool(corrected.weights.isfinite().all()), name
