"""Judges entries anew when rewards count otherwise than when they were stored: a callback has changed the weights of
the reward functions, or training resumes with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..batch.group_view import function_sums
from ..data.counters import Tally
from ..data.rewards import NOISE, RewardSetup, reward_sizes
from ..data.types import Bools, Floats, Groups
from ..setup.components import Components
from ..setup.settings import Settings
from .fresh_batch import FreshBatch
from .mixing import Mixing, alike_among

CHANGED = "since reward_weights, or the reward functions, are others"
UNKNOWN = f"a function that counts now did not score it, {CHANGED}"
SHAPED = f"its advantages are not those of TRL's rule, {CHANGED}"
DEAD = f"its rewards are equal, {CHANGED}"
ANEW = f"an entry got other advantages, {CHANGED}"
NEAR = 1e-4
"""Share of a group's largest advantage by which those of TRL's rule may be off: they are stored as float32."""


class Rejudging:
    """Gives entries the advantages of today's rewards; those that can't have any leave.

    Args:
        components ([`Components`]): The buffer.
        settings ([`Settings`]): The plugins, which shape advantages.
        mixing ([`Mixing`]): Lets them do so.
    """

    def __init__(self, components: Components, settings: Settings, mixing: Mixing) -> None:
        self._buffer = components.buffer
        self._mixing = mixing
        self._are_shaped = any("trl_replay_advantages" in plugin.hooks for plugin in settings.plugins)

    def __call__(self, fresh: FreshBatch, tally: Tally) -> None:
        """Compare today's rule from rewards to advantages with that of the entries, and judge those whose rewards
        differ.

        An entry whose file does not name its reward functions keeps its reward, which stands for the weighted sum.

        Args:
            fresh ([`FreshBatch`]): The batch at hand, with today's rule.
            tally ([`Tally`]): Counts what happens.
        """
        then, now = self._buffer.setup, fresh.rule.setup
        self._buffer.setup = now
        if then is None or then.is_same(now) or not len(self._buffer):
            return
        entries = self._buffer.as_groups()
        named = np.isnan(self._buffer.table.row_other_reward).all(axis=1)
        unknown = named & _has_new_function(then, now)
        changed = named & ~unknown & _differ(entries.rewards, then, now)
        shaped = changed & ~(self._follow_rule(entries, then) & fresh.rule.explains_batch)
        anew = np.flatnonzero(changed & ~shaped)
        groups = self._computed(fresh, entries.take(anew))
        dead = np.zeros(len(entries), bool)
        dead[anew] = groups.dead
        live = np.flatnonzero(~groups.dead)
        tally.note(len(live), ANEW)
        reasons = {UNKNOWN: unknown, SHAPED: shaped, DEAD: dead}
        self._buffer.rejudge(anew[live], groups.take(live), reasons, tally)

    def _follow_rule(self, entries: Groups, then: RewardSetup) -> Bools:
        """Entries whose advantages TRL's rule explains, `(n,)`; where plugins shape advantages, those that were
        generated here count: the plugins shape them again."""
        here = entries.origin == 0
        if not then.aggregation:  # of functions that are gone
            return np.asarray(here)
        sums = function_sums(entries.rewards, then)
        follows = _follow(np.where(entries.masked, np.nan, entries.advantages), sums)
        return np.asarray(follows | here) if self._are_shaped else follows

    def _computed(self, fresh: FreshBatch, groups: Groups) -> Groups:
        """The groups with the advantages of today's rule, as plugins shape them."""
        if not len(groups):
            return groups
        members = ~groups.masked
        advantages, dead = fresh.rule(groups.rewards, groups.total, members, members & groups.trains, join=False)
        groups = replace(groups, advantages=advantages, dead=dead)
        return self._mixing.shape(replace(groups, dead=dead | alike_among(groups, members)))


def _has_new_function(then: RewardSetup, now: RewardSetup) -> bool:
    """Tell whether a function counts that did not exist then."""
    return bool((np.isnan(then.weights) & (now.weights != 0)).any())


def _differ(rewards: Floats, then: RewardSetup, now: RewardSetup) -> Bools:
    """Groups, of raw `rewards`, `(n, G, functions)`, whose advantages may be others now, `(n,)`."""
    if (then.scale, then.aggregation) != (now.scale, now.aggregation) or now.aggregation == "normalize_then_sum":
        return np.ones(len(rewards), bool)
    weights = np.nan_to_num(then.weights)
    gap = np.abs(function_sums(rewards, then) - function_sums(rewards, now))
    noise = NOISE * np.maximum(reward_sizes(rewards, weights), reward_sizes(rewards, now.weights))
    return np.asarray((np.nan_to_num(gap) > noise).any(axis=1))


def _follow(advantages: Floats, sums: Floats) -> Bools:
    """Groups whose advantages, `(n, G)`, grow with the sums of their rewards along a straight line, `(n,)`, as all of
    TRL's rules have it. NaN does not count."""
    counted = ~(np.isnan(advantages) | np.isnan(sums))
    number = np.maximum(counted.sum(axis=1, keepdims=True), 1)

    def centered(values: Floats) -> Floats:
        kept = np.where(counted, values, 0.0)
        return np.where(counted, kept - kept.sum(axis=1, keepdims=True) / number, 0.0)

    heights, places = centered(advantages), centered(sums)
    squares = (places**2).sum(axis=1, keepdims=True)
    slope = (heights * places).sum(axis=1, keepdims=True) / np.where(squares > 0, squares, 1.0)
    off = np.abs(heights - slope * places).max(axis=1)
    return np.asarray((off <= NEAR * np.abs(heights).max(axis=1)) & (slope[:, 0] > 0))
