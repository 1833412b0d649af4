"""The table of prompts: what it counts, what it forgets, and how several ranks' tables become one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_replay.data.prompt_table import COLUMNS, PromptTable

OUTCOMES = st.lists(st.tuples(st.integers(0, 5), st.lists(st.booleans(), min_size=3, max_size=3)), max_size=30)


def note(table, key, passed, update=0):
    dead = len(set(passed)) == 1
    table.note(np.array([key]), np.array([key + 100]), np.array([passed]), np.array([dead]), update)


@settings(deadline=None, max_examples=50)
@given(OUTCOMES)
def test_every_column_is_what_a_plain_count_says(outcomes):
    table = PromptTable()
    known = {}
    for update, (key, passed) in enumerate(outcomes):
        note(table, key, passed, update)
        row = known.setdefault(key, {"tries": 0, "passes": 0, "dead_streak": 0, "shared_tries": 0, "shared_passes": 0})
        row["tries"] += 3
        row["passes"] += sum(passed)
        row["dead_streak"] = row["dead_streak"] + 1 if len(set(passed)) == 1 else 0
        row |= {"update": update, "pass_rate": sum(passed) / 3, "prompt": key + 100}
    assert table.key.tolist() == list(known)
    for name in set(COLUMNS) - {"key"}:
        assert table.get(name, list(known), default=-1).tolist() == [row[name] for row in known.values()]
    assert table.get("tries", [99], default=-1).tolist() == [-1]
    assert table.rows([99, *known]).tolist() == [-1, *range(len(known))]


def test_one_prompt_twice_in_a_batch_counts_twice():
    table = PromptTable()
    passed = np.array([[True, False], [True, True]])
    table.note(np.array([7, 7]), np.array([1, 1]), passed, np.array([False, True]), update=4)
    assert (table.tries.tolist(), table.passes.tolist(), table.dead_streak.tolist()) == ([4], [3], [1])


def test_the_prompts_of_the_longest_ago_leave_a_full_table():
    table = PromptTable(limit=32)
    for key in range(40):
        note(table, key, [True, False, False], update=key)
    assert len(table) <= 32
    assert table.key.max() == 39
    assert table.key.min() >= 8
    assert table.rows([39]).tolist() == [len(table) - 1]
    note(table, 0, [True, True, True], update=41)
    assert table.get("tries", [0], default=0).tolist() == [3]


def test_what_several_ranks_knew_is_put_together():
    one, two, whole = PromptTable(), PromptTable(), PromptTable()
    note(one, 5, [True, True, True], update=1)
    note(one, 6, [True, False, True], update=9)
    note(two, 6, [False, False, False], update=4)
    note(two, 7, [False, False, True], update=2)
    whole.load_state_dict(one.state_dict(), two.state_dict())
    assert whole.key.tolist() == [5, 6, 7]
    assert whole.tries.tolist() == [3, 6, 3]
    assert whole.passes.tolist() == [3, 2, 1]
    assert whole.update.tolist() == [1, 9, 2], "the last one's outcome"
    assert whole.dead_streak.tolist() == [1, 0, 0]


def test_120_what_ranks_share_counts_once_however_often_their_number_changes():
    """Two ranks become four, one, three and two, each of which notes a group of its own and is interrupted once."""
    ranks = [PromptTable(), PromptTable()]
    noted = 0
    for count in (2, 4, 1, 3, 2):
        states = [table.state_dict() for table in ranks]
        ranks = [PromptTable() for _ in range(count)]
        for table in ranks:
            table.load_state_dict(*states)
            assert table.get("tries", [5], default=0).tolist() == [3 * noted]
            assert table.get("passes", [5], default=0).tolist() == [2 * noted]
        for table in ranks:
            note(table, 5, [True, False, True])
            table.load_state_dict(table.state_dict(), own=True)
        noted += count
