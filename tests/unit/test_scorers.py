"""Scorers by hand."""

import numpy as np
import pytest

from trl_replay.strategies import policies
from trl_replay.testing import make_context, make_groups

GROUPS = make_groups([[1, 0, 0, 0], [1, 1, 1, 0], [0.2, 0.4, 0.1, 0.9]], update=6)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, [0.5, 0.5, 0.5]), ({"target": 0.25}, [1, 1 / 3, 1]), ({"target": 1.0, "threshold": 0.3}, [0.25, 0.75, 0.5])],
)
def test_pass_rate_is_one_at_the_target_and_falls_to_zero_at_the_far_end(kwargs, expected):
    np.testing.assert_allclose(policies.make_pass_rate_scorer(**kwargs)(GROUPS, make_context()), expected)
