"""Selectors by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trl_replay.data.success import Success
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_groups


def select(name, rewards, **kwargs):
    selector = registry().resolve("selector", name, kwargs).make()
    return np.asarray(selector(make_groups(rewards), make_context())).tolist()


REWARDS = [[1, 0, 0, 0.0], [1, 1, 1, 1.0], [0.5, 0.5, 0.5, 0.52], [1, 1, 0, 0.0], [1, 1, 1, 0.0]]
# standard deviations 0.5, 0, 0.01, 0.577, 0.5; variances 0.25, 0, 0.0001, 0.333, 0.25


SELECTIONS = [
    ("zero_std", {}, [1]),
    ("low_std", {}, [1, 2]),
    ("low_std", {"threshold": 0.5}, [1, 2, 0, 4]),
    ("min_range", {}, [1]),
    ("min_range", {"threshold": 0.021}, [1, 2]),
    ("min_nontrivial", {}, [1, 2]),
    ("min_nontrivial", {"count": 3, "tolerance": 0.3}, [1, 2, 0, 4]),
    ("top_p_variance", {"p": 0.3}, [1, 2, 0, 4]),
    ("top_p_variance", {"p": 0.6}, [1, 2, 4]),
    ("top_p_variance", {"p": 1.0}, [1]),
    ("pass_rate", {"low": 0.25, "high": 0.75}, [1, 2, 0, 4]),
    ("pass_rate", {"low": 0.0, "high": 1.0}, [1, 2]),
    ("always", {"share": 0.4}, [1, 2]),
    ("always", {"share": 0.1}, []),
    ("always", {"share": 1.0}, [1, 2, 0, 4, 3]),
]


@pytest.mark.parametrize(("name", "kwargs", "slots"), SELECTIONS)
def test_each_selector_chooses_by_hand(name, kwargs, slots):
    assert select(name, REWARDS, **kwargs) == slots


def test_a_row_that_failed_counts_in_no_pass_rate():
    failed = float("nan")
    assert select("pass_rate", [[1, 0, failed, failed], [1, 0, 0, 0.0]], low=0.25) == [1]


def test_a_row_that_failed_is_no_range_and_no_deviation():
    failed = float("nan")
    rewards = [[1, 1, failed, failed], [1, 0.5, failed, failed]]
    assert select("min_range", rewards) == [0]
    assert select("min_nontrivial", rewards) == [0]
    assert select("min_nontrivial", rewards, count=3) == [0, 1]


def test_a_group_whose_rows_all_failed_is_not_all_wrong():
    failed = float("nan")
    groups = replace(make_groups([[failed] * 4, [0.0, failed, 0.0, 0.0]]), dead=np.ones(2, bool))
    assert Success(0.5).without(groups).tolist() == [False, True]
