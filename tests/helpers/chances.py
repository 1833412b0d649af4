"""Tests that something is drawn as often as it should be."""

from __future__ import annotations

from collections import Counter

from trl_replay.testing import make_context


def frequencies(sampler, table, trials, count=1, seed=0):
    context = make_context(table, seed=seed)
    return Counter(int(row) for _ in range(trials) for row in sampler(table, count, context))


def chi_square(observed, expected):
    return sum((observed[key] - count) ** 2 / count for key, count in expected.items())
