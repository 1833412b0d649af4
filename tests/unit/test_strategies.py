"""Every built-in strategy: the contract suites, values by hand, and the table and buffer they work on."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_replay import ConfigurationError, Corrected, Group, ReplayedRows, Table, weighted_sample
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.registry import registry
from trl_replay.strategies import corrections, evictors, samplers, scorers, selectors
from trl_replay.strategies.storages import CpuStorage, DeviceStorage
from trl_replay.testing import (
    EvictorContract,
    SamplerContract,
    ScorerContract,
    SelectorContract,
    make_context,
    make_groups,
    make_table,
)

SUITES = {
    "scorer": ScorerContract,
    "evictor": EvictorContract,
    "sampler": SamplerContract,
    "selector": SelectorContract,
}

# the contract suites over everything on offer


CASES = [
    pytest.param(suite, spec, test, id=f"{spec.name}-{test}")
    for kind, suite in SUITES.items()
    for plugin, spec in registry().strategies(kind)
    if plugin.name == "builtin"
    for test in vars(suite)
    if test.startswith("test_")
]


@pytest.mark.parametrize(("suite", "spec", "test"), CASES)
def test_every_built_in_keeps_its_contract(suite, spec, test):
    subclass = type("Suite", (suite,), {"strategy": staticmethod(spec.factory())})
    getattr(subclass(), test)()


class TestProportionalSharpened(SamplerContract):
    strategy = staticmethod(samplers.make_proportional(alpha=2.5))


class TestProportionalFlat(SamplerContract):
    strategy = staticmethod(samplers.make_proportional(alpha=0))


class TestPassRateOfHardGroups(ScorerContract):
    strategy = staticmethod(scorers.make_pass_rate(threshold=0.9, target=0.0))


def marks(table, context):
    table.score[:] = 0
    return table.score


def rescales(groups, context):
    groups.rewards[:] = 0
    return np.zeros(len(groups))


BAD = [
    (ScorerContract, lambda groups, context: np.ones(3)),
    (ScorerContract, lambda groups, context: np.full(len(groups), np.nan)),
    (ScorerContract, lambda groups, context: groups.reward_mean - groups.reward_mean.mean()),
    (ScorerContract, rescales),
    (EvictorContract, lambda table, context: np.ones(2)),
    (EvictorContract, lambda table, context: table.score * np.nan),
    (EvictorContract, marks),
    (SamplerContract, lambda table, count, context: np.zeros(count, int)),
    (SamplerContract, lambda table, count, context: np.arange(count)),
    (SamplerContract, lambda table, count, context: [len(table)]),
    (SamplerContract, lambda table, count, context: np.random.permutation(len(table))[:count]),
    (SamplerContract, lambda table, count, context: np.flatnonzero(marks(table, context) == 0)[:count]),
    (SelectorContract, lambda groups, context: [0, 0]),
    (SelectorContract, lambda groups, context: [7]),
]


@pytest.mark.parametrize(("suite", "strategy"), BAD, ids=range(len(BAD)))
def test_the_contract_suites_find_strategies_that_break_them(suite, strategy):
    instance = type("TestIt", (suite,), {"strategy": staticmethod(strategy)})()
    failed = []
    for test in [name for name in vars(suite) if name.startswith("test_")]:
        try:
            getattr(instance, test)()
        except AssertionError:
            failed.append(test)
    assert failed


# scorers

GROUPS = make_groups([[1, 0, 0, 0], [1, 1, 1, 0], [0.2, 0.4, 0.1, 0.9]], step=6)
STD_OF_ONE_IN_FOUR = 0.5  # sqrt(((3/4)² + 3 (1/4)²) / 3)


def test_reward_std_is_the_bessel_corrected_deviation():
    values = scorers.reward_std(GROUPS, make_context())
    np.testing.assert_allclose(values[:2], STD_OF_ONE_IN_FOUR)
    np.testing.assert_allclose(values[2], np.std([0.2, 0.4, 0.1, 0.9], ddof=1))


def test_advantage_std_is_the_sum_of_magnitudes_times_the_deviation():
    magnitudes = (0.75 + 3 * 0.25) / (STD_OF_ONE_IN_FOUR + 1e-4)
    np.testing.assert_allclose(scorers.advantage_std(GROUPS, make_context())[:2], magnitudes * STD_OF_ONE_IN_FOUR)


def test_mean_reward_leaves_out_rows_that_no_function_scored():
    np.testing.assert_allclose(scorers.mean_reward(GROUPS, make_context()), [0.25, 0.75, 0.4])
    partial = make_groups([[1.0, np.nan, 0.0, np.nan]])
    np.testing.assert_allclose(scorers.mean_reward(partial, make_context()), [0.5])


def test_recency_grows_with_the_update_and_is_positive_from_the_first():
    np.testing.assert_array_equal(scorers.recency(GROUPS, make_context()), [7, 7, 7])
    assert (scorers.recency(make_groups([[1, 0]], step=0), make_context()) > 0).all()


def test_constant_is_one_for_all():
    np.testing.assert_array_equal(scorers.constant(GROUPS, make_context()), [1, 1, 1])


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, [0.5, 0.5, 0.5]), ({"target": 0.25}, [1, 1 / 3, 1]), ({"target": 1.0, "threshold": 0.3}, [0.25, 0.75, 0.5])],
)
def test_pass_rate_is_one_at_the_target_and_falls_to_zero_at_the_far_end(kwargs, expected):
    np.testing.assert_allclose(scorers.make_pass_rate(**kwargs)(GROUPS, make_context()), expected)


@pytest.mark.parametrize("target", [-0.1, 1.1, float("nan")])
def test_a_pass_rate_outside_zero_and_one_is_refused(target):
    with pytest.raises(ConfigurationError, match="target"):
        scorers.make_pass_rate(target=target)


# evictors


def test_evictors_rank_by_their_column():
    table = make_table([3.0, 1.0, 2.0], tag=[0.2, 0.9, 0.5], serial=[7, 8, 9])
    context = make_context(table)
    np.testing.assert_array_equal(evictors.heap(table, context), [3, 1, 2])
    np.testing.assert_array_equal(evictors.fifo(table, context), [7, 8, 9])
    np.testing.assert_array_equal(evictors.reservoir(table, context), [0.2, 0.9, 0.5])
    np.testing.assert_allclose(evictors.weighted_reservoir(table, context), np.log([0.2, 0.9, 0.5]) / [3, 1, 2])


def test_a_weighted_reservoir_ranks_a_vanishing_score_like_none_at_all():
    table = make_table([1e-310, 1.0], tag=[0.1, 0.2])
    np.testing.assert_allclose(evictors.weighted_reservoir(table, make_context(table)), [-np.inf, np.log(0.2)])


def test_a_weighted_reservoir_ranks_worthless_entries_last():
    table = make_table([1.0, 0.0, -1.0], tag=[1.0, 1.0, 0.5])
    np.testing.assert_array_equal(evictors.weighted_reservoir(table, make_context(table)), [0, -np.inf, -np.inf])


# samplers


def frequencies(sampler, table, trials, count=1, seed=0):
    context = make_context(table, seed=seed)
    return Counter(int(row) for _ in range(trials) for row in sampler(table, count, context))


def chi_square(observed, expected):
    return sum((observed[key] - count) ** 2 / count for key, count in expected.items())


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (samplers.make_proportional(), [1, 2, 3, 4]),
        (samplers.make_proportional(alpha=2.0), [1, 4, 9, 16]),
        (samplers.make_proportional(alpha=0), [1, 1, 1, 1]),
        (samplers.uniform, [1, 1, 1, 1]),
    ],
)
def test_samplers_draw_in_proportion_to_their_weights(sampler, weights):
    table = make_table([1.0, 2.0, 3.0, 4.0])
    expected = {row: 8_000 * weight / sum(weights) for row, weight in enumerate(weights)}
    assert chi_square(frequencies(sampler, table, 8_000), expected) < 16.27, "p < 0.001 with 3 degrees of freedom"


def test_top_takes_the_highest_scores_and_of_equals_the_newer():
    table = make_table([1.0, 5.0, 3.0, 3.0], serial=[0, 1, 2, 3])
    assert samplers.top(table, 3, make_context(table)).tolist() == [1, 3, 2]


def test_newest_takes_the_highest_serials_newest_first():
    table = make_table([1.0, 1.0, 1.0], serial=[5, 9, 7])
    assert samplers.newest(table, 2, make_context(table)).tolist() == [1, 2]


@pytest.mark.parametrize("alpha", [-1, float("nan")])
def test_a_negative_exponent_is_refused(alpha):
    with pytest.raises(ConfigurationError, match="alpha"):
        samplers.make_proportional(alpha=alpha)


# selector and corrections


def test_zero_std_selects_the_dead_groups():
    groups = make_groups([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
    assert selectors.zero_std(groups, make_context()).tolist() == [0, 2]


def test_ratio_gives_the_behaviour_log_probs_and_none_the_current_ones():
    new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -2.5]])
    rows = ReplayedRows(new, old, new, torch.ones(1, 2, dtype=torch.bool), torch.ones(1), torch.ones(1))
    for correction, expected in ((corrections.ratio, old), (corrections.none, new)):
        corrected = correction(rows, make_context())
        assert isinstance(corrected, Corrected)
        assert corrected.old_logps is expected
        assert corrected.weights is None


# storages


@pytest.mark.parametrize("storage", [CpuStorage(), DeviceStorage()], ids=["cpu", "device"])
def test_a_storage_keeps_copies_and_hands_out_copies(storage):
    tensor = torch.arange(4, dtype=torch.int32)
    group = Group({"completion_ids": tensor}, frozenset(["completion_ids"]), np.array([2]), np.array([1, 3]))
    storage.put(5, group)
    assert storage.nbytes == group.nbytes == 4 * 4 + 3 * 8
    tensor[:] = 9
    storage.get(5).tensors["completion_ids"][:] = 8
    storage.get(5).completion_lengths[:] = 8
    again = storage.get(5)
    assert again.tensors["completion_ids"].tolist() == [0, 1, 2, 3]
    assert again.completion_lengths.tolist() == [1, 3]
    storage.remove(5)
    assert storage.nbytes == 0


# weighted drawing


@pytest.mark.parametrize(
    "weights",
    [
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
def test_any_weights_give_distinct_indices_without_a_warning(weights):
    for count in range(len(weights) + 3):
        drawn = weighted_sample(np.array(weights), count, np.random.default_rng(count))
        assert drawn.dtype == np.int64
        assert len(set(drawn.tolist())) == len(drawn) == min(count, len(weights))
        assert all(0 <= index < len(weights) for index in drawn)


def test_nothing_is_drawn_from_nothing():
    assert weighted_sample(np.array([]), 3, np.random.default_rng(0)).tolist() == []


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
@pytest.mark.parametrize("extra", [(), (0.0,)], ids=["fast", "careful"])
def test_draws_like_one_after_the_other_without_replacement(scale, extra):
    base = np.array([1.0, 2.0, 3.0, 6.0])
    trials, rng = 12_000, np.random.default_rng(11)
    weights = np.array([*base * scale, *extra])
    observed = Counter(tuple(weighted_sample(weights, 2, rng).tolist()) for _ in range(trials))
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


# the table


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.floats(0, 1), max_size=6)), max_size=12),
)
def test_a_table_holds_what_a_plain_list_of_rows_would(capacity, rounds):
    table = Table.preallocated(capacity)
    table.add_column("mine", fill=0.5)
    model: dict[int, float] = {}
    serial = 0
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
        subset = table.take(np.arange(len(table))[::2])
        assert subset.score.tolist() == table.score[::2].tolist()
        assert len(subset) == len(subset.mine)


def test_a_plugins_column_is_filled_for_entries_present_and_to_come():
    table = make_table([1.0, 2.0])
    table.add_column("difficulty", dtype=np.float32, fill=0.5)
    table.difficulty[0] = 0.9
    table.append({"serial": np.array([7])}, 1)
    np.testing.assert_allclose(table.difficulty, [0.9, 0.5, 0.5])
    assert table.difficulty.dtype == np.float32
    assert "difficulty" in table.names


@pytest.mark.parametrize("name", ["score", "take", "row_bytes", "not a name"])
def test_a_column_whose_name_can_not_be_used_is_refused(name):
    with pytest.raises(ConfigurationError, match=name):
        make_table([1.0]).add_column(name)


def test_a_column_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(AttributeError, match=r"no column 'difficulty'; its columns are serial, step, score"):
        make_table([1.0]).difficulty  # noqa: B018


# eviction


class Ledger:
    """A storage of serial numbers only."""

    nbytes = 0

    def __init__(self):
        self.serials = set()

    def put(self, serial, group):
        assert serial not in self.serials
        self.serials.add(serial)

    def remove(self, serial):
        self.serials.remove(serial)


def fill(capacity, evictor, scores, batch=1, seed=0):
    """A buffer that was offered one group for each score, in batches."""
    buffer = ReplayBuffer(capacity, Ledger(), Limits())
    rng = np.random.default_rng(seed)
    context = make_context(buffer.table, capacity=capacity)
    for start in range(0, len(scores), batch):
        serials = np.arange(start, min(start + batch, len(scores)))
        before = len(buffer)
        columns = {"serial": serials, "step": serials, "score": np.asarray(scores, float)[serials]}
        stored, evicted = buffer.offer(columns, lambda table: evictor(table, context), rng)
        buffer.receive(dict.fromkeys(stored))
        assert set(stored) <= set(serials.tolist())
        assert len(buffer) == min(capacity, serials[-1] + 1) == before + len(stored) - evicted
        assert buffer.storage.serials == set(buffer.table.serial.tolist())
    return buffer


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_two_hundred_equal_scores_through_a_heap_of_64_leave_the_newest_64(batch):
    buffer = fill(64, evictors.heap, [1.0] * 200, batch)
    assert sorted(buffer.table.serial.tolist()) == list(range(136, 200))


def test_a_heap_keeps_the_highest_scores_and_of_equals_the_newer():
    buffer = fill(4, evictors.heap, [5, 1, 3, 3, 3, 9, 0, 3], batch=2)
    assert sorted(buffer.table.serial.tolist()) == [0, 4, 5, 7]


def test_fifo_keeps_the_newest_whatever_their_score():
    buffer = fill(3, evictors.fifo, [9, 8, 7, 6, 5], batch=2)
    assert sorted(buffer.table.serial.tolist()) == [2, 3, 4]


def survivors(evictor, scores, capacity, trials):
    counts = np.zeros(len(scores))
    for seed in range(trials):
        counts[fill(capacity, evictor, scores, batch=4, seed=seed).table.serial] += 1
    return counts


def test_a_reservoir_is_a_uniform_sample_of_everything_offered():
    count, capacity, trials = 24, 6, 800
    counts = survivors(evictors.reservoir, [1.0] * count, capacity, trials)
    share = capacity / count
    variance = trials * share * (1 - share) * count / (count - 1)  # of a sample of fixed size
    statistic = ((counts - trials * share) ** 2).sum() / variance
    assert statistic < 49.73, f"p < 0.001 with 23 degrees of freedom: {counts}"


def test_a_weighted_reservoir_of_one_keeps_in_proportion_to_the_scores():
    scores = [1.0, 2.0, 3.0, 6.0, 0.0]
    trials = 2_400
    counts = survivors(evictors.weighted_reservoir, scores, 1, trials)
    expected = {row: trials * score / 12 for row, score in enumerate(scores) if score}
    assert counts[4] == 0, "a worthless group was kept before a worthy one"
    assert chi_square(counts, expected) < 16.27, f"p < 0.001 with 3 degrees of freedom: {counts}"


def test_a_weighted_reservoir_favours_higher_scores():
    counts = survivors(evictors.weighted_reservoir, [1.0] * 12 + [4.0] * 12, 6, 200)
    assert counts[12:].sum() > 2 * counts[:12].sum()
