"""Random patterns on eight processes: straddling and uneven groups, by scope, capacity, and strategy."""

import pytest
from patterns import PATTERNS, random_pattern, wrong

RANKS = 8


@pytest.mark.parametrize("number", range(PATTERNS))
def test_a_random_pattern_is_replayed_alike_on_eight_ranks(launches, number):
    found = launches(RANKS, "patterns")
    assert [rank["text"] for rank in found] == [""] * RANKS
    assert list(wrong(random_pattern(number, RANKS), [rank["patterns"][number] for rank in found])) == []


def test_the_random_patterns_are_of_every_kind_and_replay(launches):
    made = [random_pattern(number, RANKS) for number in range(PATTERNS)]
    assert {pattern.settings["replay_scope"] for pattern in made} == {"process", "gathered"}
    assert {pattern.straddles for pattern in made} == {True, False}
    replaced = [found["counters"]["replaced"] for found in launches(RANKS, "patterns")[0]["patterns"]]
    assert sum(count > 0 for count in replaced) > PATTERNS / 2
