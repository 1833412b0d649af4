"""The stored rows that `inject` takes, and the fresh ones that they replace."""

import numpy as np

from trl_replay.strategies.policies import make_inject
from trl_replay.testing import make_context, make_groups, make_table

STORED = np.array([[0.0, 1.0, 0.5, np.nan], [0.2, 0.0, 0.9, 0.1]])


def injected(fresh, drawn, rows):
    """The rows of one slot after `inject`."""
    table = make_table([1.0, 1.0], row_rewards=STORED[:, :, None])
    context = make_context(table)
    return make_inject(rows)(table, np.array([drawn]), make_groups([fresh]), context)[0].tolist()


def test_never_that_of_a_better_one_and_no_row_that_nobody_scored():
    assert injected([0.95, 0.95, 0.95, 0.95], [0, 1], rows=2) == [1, -1, -1, -1]
    assert injected([0.0] * 4, [0, -1], rows=4) == [1, 2, 0, -1], "of four, one has no reward"
