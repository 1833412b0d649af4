"""Every built-in strategy under its contract suite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from buffers import Ledger

from trl_replay import ReplayConfig
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.registry import registry
from trl_replay.strategies import samplers, scorers
from trl_replay.testing import (
    EvictorContract,
    MixerContract,
    SamplerContract,
    ScorerContract,
    SelectorContract,
    make_context,
    make_groups,
)

SUITES = {
    "scorer": ScorerContract,
    "evictor": EvictorContract,
    "sampler": SamplerContract,
    "selector": SelectorContract,
    "mixer": MixerContract,
}


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
    (SamplerContract, lambda table, count, context: np.zeros((count + 1, 2), int) - 1),
    (MixerContract, lambda table, drawn, slots, context: np.zeros((len(drawn), 4), int)),
    (MixerContract, lambda table, drawn, slots, context: np.zeros((len(drawn), 3), int)),
    (MixerContract, lambda table, drawn, slots, context: np.tile([4, 5, 6, 7], (len(drawn), 1))),
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
        except (AssertionError, ValueError):  # a core column can only be read
            failed.append(test)
    assert failed


# every mix, on tables


def built_in(kind):
    """The names of all built-in strategies of a kind, those that a default names among them."""
    names = [spec.name for plugin, spec in registry().strategies(kind) if plugin.name == "builtin"]
    assert getattr(ReplayConfig(), f"replay_{kind}") in names
    return names


def make(kind, name):
    return registry().resolve(kind, name).make()


ROUNDS = [
    [[1, 0, 0, 0], [1, 1, 0, 0]],
    [[1, 1, 1, 0]],
    [[0.2, 0.9, 0.4, 0.1], [1, 0, 0, 0], [1, 1, 0, 0]],
    [],
    [[-1, 0, 0, 0], [3, 0, 0, 0]],
    [],
    [],
    [[1, 0, 0, 0]],
]
"""Rewards of the live groups of each update."""


@pytest.mark.parametrize("sampler", built_in("sampler"))
@pytest.mark.parametrize("evictor", built_in("evictor"))
@pytest.mark.parametrize("scorer", built_in("scorer"))
@pytest.mark.parametrize("capacity", [2, 50])
def test_any_strategies_mix(capacity, scorer, evictor, sampler):
    score, rank, sample = make("scorer", scorer), make("evictor", evictor), make("sampler", sampler)
    buffer = ReplayBuffer(capacity, Ledger(), Limits(min_size=2, max_age=3, max_uses=2))
    drawn, serial = 0, 0
    for update, rewards in enumerate(ROUNDS):
        context = make_context(buffer.table, update=update, seed=update, capacity=capacity)
        buffer.retire(update)
        if rewards:
            groups = make_groups(rewards, update=update)
            serials = np.arange(serial, serial := serial + len(groups))
            columns = {
                "serial": serials,
                "update": groups.update,
                "score": score(groups, context),
                "prompt": groups.prompt,
            }
            before = len(buffer)
            stored, evicted = buffer.offer(columns, lambda table, c=context: rank(table, c), context.rng)
            buffer.receive(dict.fromkeys(stored))
            assert len(buffer) == min(before + len(groups), capacity) == before + len(stored) - evicted
        rows, _ = buffer.eligible(update, frozenset())
        assert (update - buffer.table.update[rows] <= 3).all()
        if len(rows):
            table = buffer.table.take(rows)
            slots = replace(make_groups([[0, 0, 0, 0]] * 2), prompt=np.resize(table.prompt[::-1], 2))
            chosen = np.ravel(sample(table, 2, replace(context, slots=slots)))
            chosen = chosen[chosen >= 0]
            if sampler == "same_prompt":
                assert set(table.prompt[chosen]) <= set(slots.prompt)
            else:
                assert len(chosen) == min(2, len(rows))
            assert len(set(chosen.tolist())) == len(chosen) > 0
            buffer.use(rows[chosen], update)
            drawn += len(chosen)
        assert (buffer.table.uses <= 2).all()
    assert drawn > 2
    assert buffer.storage.serials == set(buffer.table.serial.tolist())
