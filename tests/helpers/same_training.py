"""Compares what the ranks of a launch trained on with what one process did."""

from __future__ import annotations

from typing import Any

import pytest


def everywhere(ranks: list[dict[str, Any]], step: int, key: str) -> list[Any]:
    """A row list of one step over all ranks, in the order of the rows."""
    return [value for rank in ranks for value in rank["steps"][step][key]]


def assert_same_training(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same rows in the same places, with the same log-probs, in every step."""
    for step in range(len(one["steps"])):
        for key in ("fresh", "out", "replayed"):
            assert everywhere(ranks, step, key) == one["steps"][step][key]
    for kind in ("fresh", "replayed"):
        together = {text: sums for rank in ranks for text, sums in rank["behavior"][kind].items()}
        assert set(together) == set(one["behavior"][kind])
        for text, sums in one["behavior"][kind].items():
            assert together[text][0] == pytest.approx(sums[0], abs=1e-5)
