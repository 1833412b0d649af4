"""Samplers by hand, and how often they draw what."""

import pytest
from chances import chi_square, frequencies

from trl_replay.registry import registry
from trl_replay.strategies import policies
from trl_replay.testing import make_table


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (policies.make_proportional(), [1, 2, 3, 4]),
        (policies.make_proportional(alpha=2.0), [1, 4, 9, 16]),
        (policies.make_proportional(alpha=0), [1, 1, 1, 1]),
        (policies.uniform, [1, 1, 1, 1]),
    ],
)
def test_samplers_draw_in_proportion_to_their_weights(sampler, weights):
    table = make_table([1.0, 2.0, 3.0, 4.0])
    expected = {row: 8_000 * weight / sum(weights) for row, weight in enumerate(weights)}
    assert chi_square(frequencies(sampler, table, 8_000), expected) < 16.27, "p < 0.001 with 3 degrees of freedom"


def test_least_used_chooses_among_equals_by_even_chances():
    table = make_table([9.0, 1.0, 1.0, 1.0, 1.0], uses=[4, 2, 2, 2, 2])
    found = frequencies(policies.least_used, table, 8_000)
    assert chi_square(found, dict.fromkeys((1, 2, 3, 4), 2000)) < 16.27, "p < 0.001 with 3 degrees of freedom"


def test_every_prompt_has_the_same_chance_to_be_drawn():
    table = make_table([1.0] * 10, prompt=[1] * 9 + [2])
    found = frequencies(registry().resolve("sampler", "prompt_balanced").make(), table, 2000)
    assert 900 < found[9] < 1100
