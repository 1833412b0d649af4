"""Tests that something is drawn as often as it should be."""

from __future__ import annotations

from collections import Counter

from trl_replay.testing import make_context


def frequencies(sampler, table, trials):
    context = make_context(table)
    return Counter(int(sampler(table, 1, context)[0]) for _ in range(trials))


def chi_square(observed, expected):
    return sum((observed[key] - count) ** 2 / count for key, count in expected.items())
