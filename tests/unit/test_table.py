"""The table's columns, and weighted drawing over them."""

import copy
import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from chances import chi_square
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_replay import ConfigurationError, ReplayError, Table, weighted_sample
from trl_replay.data.table import lowest
from trl_replay.testing import make_table


@pytest.mark.parametrize(
    "weights",
    [
        [],
        [0.0] * 5,
        [np.nan] * 5,
        [np.inf] * 5,
        [-1.0] * 5,
        [1e-320] * 5,
        [1e308] * 5,
        [2.0] * 5,
        [0.0, np.nan, np.inf, -1.0, 1e-320, 1e308, 2.0, -np.inf],
        [1e-300, 1e300],
    ],
    ids=str,
)
def test_5_any_weights_give_distinct_indices_without_a_warning(weights):
    for count in range(-1, len(weights) + 3):
        drawn = weighted_sample(np.array(weights), count, np.random.default_rng(0))
        assert drawn.dtype == np.int64
        assert len(set(drawn.tolist())) == len(drawn) == min(max(count, 0), len(weights))
        assert all(0 <= index < len(weights) for index in drawn)


def test_infinite_weights_come_first_then_positive_ones_then_the_rest():
    weights = np.array([0.0, 1e-300, np.inf, np.nan, 5.0, -1.0, np.inf])
    for seed in range(50):
        drawn = weighted_sample(weights, 7, np.random.default_rng(seed)).tolist()
        assert [set(drawn[:2]), set(drawn[2:4]), set(drawn[4:])] == [{2, 6}, {1, 4}, {0, 3, 5}]


@pytest.mark.parametrize("worthless", [0.0, np.nan, -3.0])
def test_worthless_weights_are_drawn_with_equal_chances(worthless):
    rng = np.random.default_rng(3)
    observed = Counter(int(weighted_sample(np.full(4, worthless), 1, rng)[0]) for _ in range(4_000))
    assert chi_square(observed, dict.fromkeys(range(4), 1_000)) < 16.27, "p < 0.001 with 3 degrees of freedom"


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_draws_like_one_after_the_other_without_replacement(scale):
    base = np.array([1.0, 2.0, 3.0, 6.0])
    trials, rng = 12_000, np.random.default_rng(11)
    observed = Counter(tuple(weighted_sample(base * scale, 2, rng).tolist()) for _ in range(trials))
    expected = {
        (first, second): trials * base[first] / 12 * base[second] / (12 - base[first])
        for first, second in itertools.permutations(range(4), 2)
    }
    assert sum(observed[pair] for pair in expected) == trials
    assert chi_square(observed, expected) < 31.26, "p < 0.001 with 11 degrees of freedom"


def test_the_generator_advances_alike_whatever_the_weights_are():
    states = []
    for weights in ([1.0, 2.0, 3.0], [0.0, np.nan, np.inf]):
        rng = np.random.default_rng(0)
        weighted_sample(np.array(weights), 2, rng)
        states.append(rng.random())
    assert states[0] == states[1]


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 6), st.lists(st.floats(0, 1), max_size=6)), max_size=12))
def test_a_table_holds_what_a_plain_list_of_rows_would(capacity, rounds):
    table = Table.empty()
    table.add_column("mine", fill=0.5)
    model = {}
    serial = 0
    assert table.rows_of([0]).tolist() == [-1]
    for added, leaving in rounds:
        serials = np.arange(serial, serial + added)
        serial += added
        table.append({"serial": serials, "score": serials * 0.5}, added)
        model |= {int(number): number * 0.5 for number in serials}
        rows = np.unique([int(share * (len(table) - 1)) for share in leaving]) if len(table) and leaving else []
        rows = np.random.default_rng(serial).permutation(np.array(rows, np.int64))
        for number in table.serial[rows].tolist():
            del model[number]
        table.remove(rows)
        assert len(table) == len(model) == len(table.tag) == len(table.mine)
        assert dict(zip(table.serial.tolist(), table.score.tolist(), strict=True)) == model
        assert (table.mine == 0.5).all()
        assert table.rows_of(table.serial).tolist() == list(range(len(table)))
        assert table.rows_of([-1, serial]).tolist() == [-1, -1]
        subset = table.take(np.arange(len(table))[::2])
        assert subset.score.tolist() == table.score[::2].tolist()
        assert len(subset) == len(subset.mine)


def test_entries_of_a_prompt_are_counted_right_as_they_come_and_leave():
    rng = np.random.default_rng(0)
    table, serial = Table.empty(), 0
    for _ in range(400):
        count = int(rng.integers(0, 6))
        serials = serial + rng.permutation(count)
        if rng.random() < 0.2:  # as `session.add` between a batch and its candidates leaves them
            serials = -1 - serials
        table.append({"serial": serials, "prompt": rng.integers(0, rng.choice([3, 50, 2**62]), count)}, count)
        serial += count
        table.remove(rng.permutation(len(table))[: max(len(table) - 40, int(rng.integers(0, 3)))])
        assert_counted(table)
        assert table.tasks == len(set(table.prompt.tolist()))
    table.remove(np.arange(len(table)))
    assert table.tasks == 0


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.integers(0, 3)), st.integers(-1, 9), st.randoms(use_true_random=False))
def test_the_lowest_come_as_from_a_whole_sort(first, count, random):
    then = np.array(random.sample(range(len(first)), len(first)), np.int64)
    whole = np.lexsort((then, np.array(first, np.int64)))
    assert lowest(np.array(first, np.int64), then, count).tolist() == whole[: max(count, 0)].tolist()


def test_what_was_taken_of_a_table_is_not_read_once_entries_have_come():
    table = make_table([1.0, 2.0, 3.0])
    taken = table.take(np.array([2, 0]))
    assert taken.score.tolist() == [3.0, 1.0]
    table.append({"serial": np.array([7])}, 1)
    assert taken.score.tolist() == [3.0, 1.0]
    with pytest.raises(ReplayError, match="uses is read too late"):
        taken.uses  # noqa: B018


def test_a_table_can_be_read_after_rows_that_do_not_fit_it():
    table = make_table([1.0, 2.0])
    assert table.score.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="could not broadcast"):
        table.append({"score": np.zeros(3)}, 1000)
    table.writable("score")[0] = 7.0
    assert table.score.tolist() == [7.0, 2.0]


def assert_counted(table):
    same = table.prompt[:, None] == table.prompt
    newer = same & (table.serial[:, None] < table.serial)
    assert table.peers.tolist() == same.sum(axis=1).tolist()
    assert table.newer.tolist() == newer.sum(axis=1).tolist()


def test_a_plugins_column_is_filled_for_entries_present_and_to_come():
    table = make_table([1.0, 2.0])
    table.add_column("difficulty", dtype=np.float32, fill=0.5)
    table.difficulty[0] = 0.9
    table.append({"serial": np.array([7])}, 1)
    np.testing.assert_allclose(table.difficulty, [0.9, 0.5, 0.5])
    assert table.difficulty.dtype == np.float32
    assert "difficulty" in table.names


@pytest.mark.parametrize("name", ["score", "take", "row_bytes", "not a name"])
def test_a_column_can_not_hide_what_a_table_has(name):
    with pytest.raises(ConfigurationError, match=name):
        make_table([1.0]).add_column(name)


def test_a_column_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(AttributeError, match=r"no column 'difficulty'; its columns are serial, update, score"):
        make_table([1.0]).difficulty  # noqa: B018


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copied_table_has_columns_of_its_own(duplicate):
    table = make_table([1.0, 2.0, 3.0])
    assert table.score.tolist() == [1.0, 2.0, 3.0]
    other = duplicate(table)
    other.writable("score")[0] = 9.0
    assert other.score.tolist() == [9.0, 2.0, 3.0]
    assert table.score.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="read-only"):
        other.score[0] = 1.0


def test_what_is_read_of_a_table_is_the_readers_own_view():
    table = make_table([1.0, 2.0, 3.0])
    table.add_column("mine")
    view = table.mine
    view.shape = (-1, 1)
    view.flags.writeable = False
    table.mine[0] = 5.0
    assert table.mine.tolist() == [5.0, 0.0, 0.0]
