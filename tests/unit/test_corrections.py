"""Corrections by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from corrected import CORRECTIONS

import trl_replay
from trl_replay import Corrected, ReplayedRows
from trl_replay.registry import registry
from trl_replay.strategies import corrections
from trl_replay.testing import (
    make_context,
)


def test_ratio_gives_the_behaviour_log_probs_and_none_the_current_ones():
    new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -2.5]])
    rows = ReplayedRows(new, old, new, torch.ones(1, 2, dtype=torch.bool), torch.ones(1), torch.ones(1))
    for correction, expected in ((corrections.ratio, old), (corrections.none, new)):
        corrected = correction(rows, make_context())
        assert isinstance(corrected, Corrected)
        assert corrected.old_logps is expected
        assert corrected.weights is None


def rows_of(logs: list[list[float]], advantages: list[float], length: int = 4) -> ReplayedRows:
    """Replayed rows whose log ratios are given; the last position of each is padding."""
    ratios = torch.tensor([[*log, 0.0] for log in logs])
    behaviour = torch.full_like(ratios, -1.5)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    mask[:, -1] = False
    new = behaviour + ratios
    return ReplayedRows(new, behaviour, new, mask, torch.tensor(advantages), torch.ones(len(logs), dtype=torch.int64))


def made(name: str, **kwargs: Any) -> Any:
    return registry().resolve("correction", name, "replay_correction").make(**kwargs)


def test_m2po_masks_the_largest_log_ratios_until_their_second_moment_is_small() -> None:
    rows = rows_of([[0.1, 0.5, -0.1], [0.0, -0.9, 0.2]], [1.0, -1.0])
    corrected = made("m2po", threshold=0.02)(rows, make_context())
    # squares .01 .25 .01 / 0 .81 .04: without .81 and .25 the mean is .06 / 4 = .015
    assert corrected.weights[rows.mask].tolist() == [1, 0, 1, 1, 0, 1]
    assert torch.equal(corrected.old_logps, rows.behaviour_logps)
    everything = made("m2po", threshold=1.0)(rows, make_context())
    assert bool((everything.weights[rows.mask] == 1).all())


def test_truncated_at_sequence_level_gives_one_weight_a_row() -> None:
    rows = rows_of([[0.1, 0.2, 0.3], [-0.5, -0.5, 0.1]], [1.0, -1.0])
    corrected = made("truncated", cap=1.5, level="sequence")(rows, make_context())
    torch.testing.assert_close(corrected.weights, torch.tensor([1.5, math.exp(-0.9)]))


def test_huge_ratios_stay_finite() -> None:
    rows = rows_of([[200.0, -300.0, 90.0], [-500.0, -500.0, -500.0]], [1.0, -1.0])
    for name in [*CORRECTIONS, "m2po"]:
        corrected = made(name)(rows, make_context())
        assert corrected.weights is None or bool(corrected.weights.isfinite().all()), name


BAD = [
    ("per", {"beta": 2}, "beta=2"),
    ("per", {"final_beta": -0.1}, "final_beta=-0.1"),
    ("per", {"updates": 0}, "updates=0"),
    ("truncated", {"cap": 0}, "cap=0"),
    ("truncated", {"level": "row"}, "level='row'"),
    ("sequence_mask", {"low": 2.0, "high": 1.0}, "high=1.0"),
    ("topr", {"cap": float("inf")}, "cap=inf"),
    ("m2po", {"threshold": -1}, "threshold=-1"),
    ("decoupled", {"cap": True}, "cap=True"),
    ("shaped", {"gamma": 0.0}, "gamma=0.0"),
]


@pytest.mark.parametrize(("name", "kwargs", "words"), BAD)
def test_a_bad_argument_is_refused_by_name(name: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match=words):
        made(name, **kwargs)
