"""Every built-in strategy under its contract suite."""

import itertools
import re

import numpy as np
import pytest

from trl_replay import ConfigurationError, ReplayError
from trl_replay.registry import registry
from trl_replay.strategies import policies
from trl_replay.testing import (
    CorrectionContract,
    EvictorContract,
    MixerContract,
    SamplerContract,
    ScorerContract,
    SelectorContract,
)

SUITES = {
    "scorer": ScorerContract,
    "evictor": EvictorContract,
    "sampler": SamplerContract,
    "selector": SelectorContract,
    "mixer": MixerContract,
    "correction": CorrectionContract,
}


CASES = [
    pytest.param(suite, spec, test, id=f"{spec.name}-{test}")
    for kind, suite in SUITES.items()
    for plugin, spec in registry().strategies(kind)
    if plugin.name == "builtin"
    for test in dir(suite)
    if test.startswith("test_")
]


@pytest.mark.parametrize(("suite", "spec", "test"), CASES)
def test_every_built_in_keeps_its_contract(suite, spec, test):
    subclass = type("Suite", (suite,), {"strategy": staticmethod(spec.factory())})
    getattr(subclass(), test)()


class TestProportionalSharpened(SamplerContract):
    strategy = staticmethod(policies.make_proportional(alpha=2.5))


class TestProportionalFlat(SamplerContract):
    strategy = staticmethod(policies.make_proportional(alpha=0))


class TestPassRateOfHardGroups(ScorerContract):
    strategy = staticmethod(policies.make_pass_rate_scorer(threshold=0.9, target=0.0))


def marks(table, context):
    table.score[:] = 0
    return table.score


def rescales(groups, context):
    groups.rewards[:] = 0
    return np.zeros(len(groups))


CALLS = itertools.count()
BAD = [
    (ScorerContract, lambda groups, context: np.ones(3)),
    (ScorerContract, lambda groups, context: np.full(len(groups), np.nan)),
    (ScorerContract, lambda groups, context: groups.reward_mean - groups.reward_mean.mean()),
    (ScorerContract, rescales),
    (ScorerContract, lambda groups, context: np.random.default_rng().random(len(groups))),
    (EvictorContract, lambda table, context: np.ones(2)),
    (EvictorContract, lambda table, context: table.score * np.nan),
    (EvictorContract, lambda table, context: np.random.default_rng().random(len(table))),
    (EvictorContract, marks),
    (SamplerContract, lambda table, count, context: np.zeros(count, int)),
    (SamplerContract, lambda table, count, context: np.arange(count)),
    (SamplerContract, lambda table, count, context: [len(table)]),
    (SamplerContract, lambda table, count, context: np.random.permutation(len(table))[:count]),
    (SamplerContract, lambda table, count, context: np.flatnonzero(marks(table, context) == 0)[:count]),
    (SamplerContract, lambda table, count, context: np.zeros((count + 1, 2), int) - 1),
    (MixerContract, lambda table, drawn, slots, context: np.zeros((len(drawn), 4), int)),
    (MixerContract, lambda table, drawn, slots, context: np.zeros((len(drawn), 3), int)),
    (MixerContract, lambda table, drawn, slots, context: np.tile([4, 5, 6, 7], (len(drawn), 1))),
    (SelectorContract, lambda groups, context: [0, 0]),
    (MixerContract, lambda table, drawn, slots, context: np.roll([[0, 1, 2, 3]] * 2, next(CALLS), axis=1)),
    (SelectorContract, lambda groups, context: [7]),
    (SelectorContract, lambda groups, context: np.random.default_rng().permutation(len(groups))),
]


@pytest.mark.parametrize(("suite", "strategy"), BAD, ids=range(len(BAD)))
def test_the_contract_suites_find_strategies_that_break_them(suite, strategy):
    instance = type("TestIt", (suite,), {"strategy": staticmethod(strategy)})()
    failed = []
    for test in [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(instance, test)()
        except (AssertionError, ValueError, ReplayError):  # a core column can only be read
            failed.append(test)
    assert failed


# every mix, on tables


"""Rewards of the live groups of each update."""


NAN, INF = float("nan"), float("inf")
BAD_ARGUMENTS = [
    ("scorer", "pass_rate", "target", [-0.1, 1.1, NAN]),
    ("sampler", "proportional", "alpha", [-1, NAN, "x", None, True]),
    ("selector", "low_std", "threshold", [-1]),
    ("selector", "min_range", "threshold", [-1, NAN]),
    ("selector", "min_nontrivial", "count", [0, 1.5]),
    ("selector", "min_nontrivial", "tolerance", [-1]),
    ("selector", "top_p_variance", "p", [0]),
    ("selector", "pass_rate", "low", [0.9]),  # above `high`
    ("selector", "always", "share", [0]),
    ("mixer", "inject", "rows", [0, 1.5, True]),
    ("correction", "per", "beta", [2]),
    ("correction", "per", "final_beta", [-0.1]),
    ("correction", "per", "updates", [0]),
    ("correction", "truncated", "cap", [0]),
    ("correction", "truncated", "level", ["row"]),
    ("correction", "sequence_mask", "high", [0.1]),  # below `low`
    ("correction", "topr", "cap", [INF]),
]


@pytest.mark.parametrize(
    ("kind", "name", "argument", "value"), [(*row, value) for *row, values in BAD_ARGUMENTS for value in values]
)
def test_a_bad_argument_is_named_with_its_strategy_and_the_remedy(kind, name, argument, value):
    named = re.escape(f"{name}: {argument}={value!r}")
    with pytest.raises(ConfigurationError, match=rf"{named}( and high=\S+)? can't be used: give "):
        registry().resolve(kind, name, {argument: value}).make()
