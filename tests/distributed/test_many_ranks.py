"""Eight processes: straddling and uneven groups, random patterns, and one that is late, raises, is killed or missing.

A launch runs through the cases (ranks/many_ranks.py), each with a process group of its own; beside it others through
those in which ranks wait in vain.
"""

import pytest
from launches import check_batches_of_all, check_groups, check_one_table, everywhere, side_by_side
from patterns import LOST, PATTERNS, SLOW, random_pattern, wrong

RANKS = 8
UPDATES = 6
TRAINED = ["process whole", "gathered, one is late", "gathered straddling"]
SHARED = TRAINED[1:]
IN_VAIN = (("one is not attached",), ("one is too late",))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of every rank in a case, in rank order."""
    return side_by_side("many_ranks", tmp_path_factory.mktemp("many"), RANKS, *IN_VAIN)


@pytest.mark.parametrize("case", TRAINED)
def test_30_eight_ranks_come_to_the_end_whatever_each_has_dead_and_live(ranks, case):
    """One is a second late in each of two cases, which is within its time-out."""
    found = ranks(case)
    assert [(rank["type"], rank["text"]) for rank in found] == [("", "")] * RANKS
    assert [len(rank["steps"]) for rank in found] == [UPDATES] * RANKS
    live = [[value != 0 for value in everywhere(found, step, "advantages_in")] for step in range(UPDATES)]
    assert not any(live[0]), "all dead, nothing stored"
    assert any(live[1])
    assert not all(live[1]), "the first rank's groups are dead"
    assert all(live[2]), "all live, nothing to fill"
    assert sum(rank["counters"]["replaced"] for rank in found) > 0


@pytest.mark.parametrize("case", TRAINED)
def test_16_of_eight_ranks_each_counts_the_tokens_and_marks_the_rows_of_all(ranks, case):
    check_batches_of_all(ranks(case))


@pytest.mark.parametrize("case", SHARED)
def test_eight_ranks_have_one_table_and_groups_that_straddled_them_come_whole(ranks, case):
    found = ranks(case)
    check_one_table(found)
    replayed, traveled = check_groups(found, size=4)
    assert replayed > 3
    assert traveled > 0


@pytest.mark.parametrize("number", range(PATTERNS))
def test_a_random_pattern_is_replayed_alike_on_eight_ranks(ranks, number):
    pattern = random_pattern(number, RANKS)
    found = ranks("patterns")
    assert [rank["text"] for rank in found] == [""] * RANKS
    assert list(wrong(pattern, [rank["patterns"][number] for rank in found])) == []


def test_the_random_patterns_are_of_every_kind_and_replay(ranks):
    made = [random_pattern(number, RANKS) for number in range(PATTERNS)]
    assert {pattern.settings["replay_scope"] for pattern in made} == {"process", "gathered"}
    assert {pattern.straddles for pattern in made} == {True, False}
    replaced = [found["counters"]["replaced"] for found in ranks("patterns")[0]["patterns"]]
    assert sum(count > 0 for count in replaced) > PATTERNS / 2


def test_of_two_ranks_that_raise_all_eight_name_both(ranks):
    for number, rank in enumerate(ranks("two raise")):
        own = number in (SLOW, LOST)
        assert rank["type"] == ("HookError" if own else "SeamError")
        (told,) = rank["notes"] if own else [rank["text"]]
        for failed in (SLOW, LOST):
            words = f"rank {failed}: HookError: The scorer 'Acting' failed in trl_replay_score at update 2"
            assert words in told
            assert f"no luck on rank {failed}" in told
        assert told.count("HookError") == 2, "and nobody else"


def test_43_seven_ranks_that_wait_for_one_without_replay_name_it(ranks):
    for number, rank in enumerate(ranks("one is not attached")):
        if number == LOST:
            assert not rank["ours"], "it waits in a collective of the trainer's"
            assert rank["type"]
        else:
            assert rank["type"] == "SeamError"
            assert f"Replay waits on rank {number} with training: rank {LOST} did not reach it" in rank["text"]


@pytest.mark.parametrize("case", ["one is too late", "one is killed"])
def test_all_others_raise_where_one_does_not_come(ranks, case):
    for number, rank in enumerate(ranks(case)):
        killed = case == "one is killed" and number == LOST
        assert rank["type"] == ("killed" if killed else "RuntimeError"), rank["text"]
