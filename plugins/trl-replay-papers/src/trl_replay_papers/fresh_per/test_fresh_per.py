"""FreshPER: priorities, their fading, and PER's weights, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trl_replay import ConfigurationError
from trl_replay.base.validation import Named
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_groups, make_table
from trl_replay_papers.fresh_per import SETTINGS, make_fading, mean_abs_reward


def test_priorities_fade_with_age_and_are_raised_to_a_power() -> None:
    table = make_table([0.5, 0.5, 2.0], update=[100, 0, 600])
    weights = make_fading().weights(table, make_context(table, update=600))
    expected = [(0.5 * np.exp(-1.0)) ** 0.6, (0.5 * np.exp(-1.2)) ** 0.6, 2.0**0.6]
    assert weights.tolist() == pytest.approx(expected)


def test_a_groups_priority_is_its_mean_reward_without_its_sign() -> None:
    groups = make_groups([[1.0, -1.0, 0.0, 0.0], [0.0] * 4, [np.nan, 2.0, np.nan, 0.0]])
    assert mean_abs_reward(groups, make_context(make_table([]))).tolist() == pytest.approx([0.500001, 1e-6, 1.000001])


def test_weights_are_pers_with_a_growing_exponent() -> None:
    import torch

    from trl_replay.data.types import ReplayedRows

    correct = registry().resolve("correction", *Named.read(SETTINGS["replay_correction"])).make()
    logps, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    ages, priorities = torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 4.0])
    rows = ReplayedRows(logps, logps, logps, mask, torch.ones(2), ages, priorities)
    for update, beta in ((0, 0.4), (500, 0.7), (5000, 1.0)):
        weights = correct(rows, make_context(make_table([]), update=update)).weights
        assert weights.tolist() == pytest.approx([1.0, 4.0**-beta])


@pytest.mark.parametrize("arguments", [{"alpha": 0}, {"tau": -1.0}])
def test_arguments_that_can_not_be_used_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="can't be used"):
        make_fading(**arguments)
