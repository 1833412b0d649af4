"""Advantages and masks of all rows, where a plugin shapes them or stored rows meet fresh ones.

Decided from columns alone, alike on all processes that share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.group_view import AdvantageRule, least_size, teach_nothing
from ..data.counters import Tally
from ..data.plan import Plan
from ..data.rewards import reward_noise
from ..data.table import Table
from ..data.types import NONE, Bools, Floats, Groups, Ints
from ..errors import SeamError
from ..setup.settings import Components, Settings
from .fresh_batch import FreshBatch


def shaped(fresh: Groups, given: Floats) -> Groups:
    """The fresh groups with a plugin's advantages.

    A group that was changed is dead if all of its rows that train have advantages next to 0: beside the batch's
    largest, and where it was dead before, beside its rewards, since a batch or a round may hold none that is larger,
    and beside what TRL's rounding left of rows that the plugin left alone. A group that is dead by the function that
    counts stays so, unless the plugin has given all of its rows one advantage of its own. Masked rows stay masked.

    Args:
        fresh ([`Groups`]): As the trainer made them.
        given (`(n, G)`): Advantages; NaN for rows that train nothing.
    """
    left = given == fresh.advantages
    masked = np.isnan(given) | fresh.masked
    rounded = np.where(masked, 0.0, given).astype(np.float32).astype(np.float64)  # as they are trained on
    advantages = np.where(left, fresh.advantages, rounded)
    changed = replace(fresh, advantages=advantages, masked=masked)
    least: Floats | float = least_size(advantages, fresh.advantages[~fresh.dead])
    noise = reward_noise(fresh.rewards, fresh.reward_weights)
    rounding = np.where(left & changed.trains, np.abs(fresh.advantages), 0.0).max(axis=1)
    least = np.where(fresh.dead, np.maximum(np.maximum(least, noise), rounding), least)
    touched = (~left | masked).any(axis=1)
    dead = np.where(touched, teach_nothing(advantages, changed.trains, least), fresh.dead)
    return replace(changed, dead=dead | (changed.alike & ~_have_one(advantages, changed.trains)))


def alike_among(groups: Groups, members: Bools) -> Bools:
    """Groups whose `members` are alike by the function that counts, `(n,)`."""
    return replace(groups, rewards=np.where(members[..., None], groups.rewards, np.nan)).alike


def _have_one(advantages: Floats, trains: Bools) -> Bools:
    """Groups all of whose rows that train have the same advantage, and not 0, `(n,)`."""
    highest = np.where(trains, advantages, -np.inf).max(axis=1)
    lowest = np.where(trains, advantages, np.inf).min(axis=1)
    return np.asarray((highest == lowest) & (highest != 0.0))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Slots that may be filled, and the plan of their rows: `n` groups of `G` rows.

    Attributes:
        groups ([`Groups`]): The fresh groups.
        used (`(entries,)` int64): The entries that give rows, as rows of the eligible table.
        table ([`Table`]): These entries alone.
        plan ([`Plan`]): With rows of `table` as entries.
        computed (`(n,)` bool): Slots whose advantages are computed anew.
    """

    groups: Groups
    used: Ints
    table: Table
    plan: Plan
    computed: Bools

    def column(self, name: str, fresh: NDArray[Any]) -> NDArray[Any]:
        """A row column of the table where a row is stored, and what is given elsewhere."""
        return self.plan.column(getattr(self.table, name), fresh)

    @property
    def trainable(self) -> Ints:
        """Trained tokens of each row, `(n, G)`."""
        return self.column("row_trainable", self.groups.trainable)

    def of_entries(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value of each stored row's entry, `(n, G)`."""
        if not len(values):
            return np.zeros(self.plan.entry.shape, values.dtype)
        return np.asarray(values[self.plan.entry])

    def take(self, slots: Ints) -> Mixed:
        """Some of the slots, in their order."""
        if len(slots) == len(self.computed):
            return self
        return Mixed(self.groups.take(slots), self.used, self.table, self.plan.take(slots), self.computed[slots])

    def lacks_a_function(self) -> Bools:
        """Tell which rows' entries have no reward of a function that scored the fresh group, `(n, G)`: sums with and
        without it have no baseline in common. A checkpoint's entries lack a function that is new."""
        stored = np.asarray(~np.isnan(self.table.row_rewards).all(axis=1))  # (entries, functions)
        fresh = np.asarray(~np.isnan(self.groups.rewards).all(axis=1))  # (n, functions)
        lacking = np.zeros(self.plan.entry.shape, bool)
        for function in np.flatnonzero(self.groups.reward_weights):
            lacking |= self.of_entries(~stored[:, function]) & fresh[:, [function]]
        return lacking

    def as_groups(self, dead: Bools) -> Groups:
        """The mixed groups as a plugin sees them."""
        return replace(
            self.groups,
            rewards=self.column("row_rewards", self.groups.rewards),
            advantages=self.plan.advantages,
            lengths=self.column("row_length", self.groups.lengths),
            trainable=self.trainable,
            items=self.column("row_items", self.groups.items),
            dead=dead,
            behavior_logps=None,
            masked=self.plan.masked,
        )


def planned(groups: Groups, table: Table, drawn: Ints, chosen: Ints, setting: str) -> Mixed:
    """Make a plan of what a mixer chose.

    Args:
        groups ([`Groups`]): The fresh groups of the slots.
        table ([`Table`]): The eligible entries.
        drawn (`(n, k)`): Rows of `table`, -1 for none.
        chosen (`(n, G)`): For each row of a slot `e * G + r`, or -1.
        setting (`str`): `replay_advantages`.

    Returns:
        The plan over the entries that give rows.
    """
    size = chosen.shape[1]
    stored = chosen != NONE
    number = np.where(stored, chosen // size, 0)
    entries = drawn[np.arange(len(drawn))[:, None], number]
    used = np.unique(entries[stored])
    plan = Plan.of(groups)
    plan.entry = np.where(stored, np.searchsorted(used, entries), plan.entry)
    plan.source = np.where(stored, chosen % size, plan.source)
    computed = ~plan.is_whole if setting == "auto" else np.full(len(groups), setting != "stored")
    return Mixed(groups, used, table.take(used), plan, computed)


class Mixing:
    """Lets plugins shape advantages and a mixer put stored rows beside fresh ones, and decides what all rows train
    with.

    Args:
        components ([`Components`]): The hooks, and the buffer that tells their context.
        settings ([`Settings`]): How advantages of mixed groups are made.
    """

    def __init__(self, components: Components, settings: Settings) -> None:
        self._hooks = components.hooks
        self._context = components.buffer.context
        self._settings = settings
        self._shapes = components.hooks.has_plugin_for("advantages") and not settings.config.replay_dry_run

    def shape(self, groups: Groups) -> Groups:
        """Let a plugin shape the advantages of fresh rows, before anything is decided by them, and of those that
        were computed for mixed groups."""
        if not self._shapes:
            return groups
        given = self._hooks.advantages(groups, self._context())
        return groups if given is None else shaped(groups, given)

    def mix(
        self, fresh: FreshBatch, slots: Ints, table: Table, drawn: Ints, most: int, tally: Tally
    ) -> tuple[Ints, Mixed]:
        """Decide which stored rows take which rows of the slots, and what all of their rows train with.

        Args:
            fresh ([`FreshBatch`]): The batch.
            slots (`(n,)`): For which something was drawn.
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)`): Rows of `table`.
            most (`int`): So many slots at most: the first of those that can be filled.
            tally ([`Tally`]): Counts why rows and slots stay fresh.

        Returns:
            Those of the slots that take a stored row and would not be dead, and their plan.
        """
        groups = fresh.groups.take(slots)
        setting = self._settings.config.replay_advantages
        chosen = self._hooks.mix(table, drawn, groups, self._context(groups))
        mixed = planned(groups, table, drawn, chosen, setting)
        self._keep_fresh(mixed, tally)
        dead = self._set_advantages(fresh, mixed)
        some = mixed.plan.stored.any(axis=1)
        tally.note(int((~some).sum()), "the mixer took no stored row for a slot")
        what = "the stored rows alone" if setting == "split" else "a mixed group"
        tally.note(int((some & dead).sum()), f"{what} would have been dead")
        kept = np.flatnonzero(some & ~dead)[:most]
        mixed = mixed.take(kept)
        if fresh.rule.spans_batch and mixed.computed.any() and len(kept) < len(slots):
            self._set_advantages(fresh, mixed)  # a slot left fresh counts once in the batch's deviation
        return slots[kept], mixed

    def _keep_fresh(self, mixed: Mixed, tally: Tally) -> None:
        """Put fresh rows back in the places of stored ones that can't stand beside others."""
        if mixed.plan.is_whole.all() and not mixed.computed.any():
            return
        table = mixed.table
        anew = mixed.computed[:, None]
        unknown = np.asarray(np.isnan(table.row_total).all(axis=1))  # scored by functions of another run
        silent = mixed.column("row_trains", np.ones(mixed.plan.entry.shape, bool)) == 0
        unfit: dict[str, Callable[[], Bools]] = {
            "a stored row can't be mixed: its rewards are not known, or not of each function": (
                lambda: (mixed.of_entries(unknown) | mixed.lacks_a_function()) & anew
            ),
            f"{self._hooks.giver} chose a stored row that trains nothing: the fresh row stays": (
                lambda: silent & ~mixed.plan.is_whole[:, None]
            ),
            "a stored row of another prompt can't share the slot's baseline": (
                lambda: (mixed.of_entries(table.prompt) != mixed.groups.prompt[:, None]) & anew
            ),
        }
        for reason, find in unfit.items():
            rows = find() & mixed.plan.stored
            if not rows.any():
                continue
            tally.note(int(rows.sum()), reason)
            mixed.plan.keep_fresh(rows)

    def _set_advantages(self, fresh: FreshBatch, mixed: Mixed) -> Bools:
        """Write what the rows train with: their own advantages, or new ones where these are computed. Return which
        groups are dead then, `(n,)`.

        A group that is replayed whole is dead if no row trains: a file's groups may be all right. Others are judged
        beside the largest advantage, and fresh rows of dead slots count for nothing.
        """
        plan = mixed.plan
        plan.advantages = mixed.column("row_advantage", mixed.groups.advantages).astype(np.float64)
        plan.masked = mixed.column("row_masked", mixed.groups.masked)
        counted = np.where(plan.stored | ~mixed.groups.dead[:, None], plan.advantages, 0.0)
        of_batch = fresh.groups.advantages
        least = 0.0
        if not plan.is_whole.all():
            least = least_size(np.concatenate([counted, of_batch]), of_batch[~fresh.groups.dead])
        trains = (mixed.trainable > 0) & ~plan.masked
        dead = teach_nothing(counted, trains, np.where(plan.is_whole, 0.0, least))
        some = np.flatnonzero(mixed.computed)
        if len(some):
            anew = mixed.take(some)
            dead[some] = self._compute_advantages(fresh.rule, anew)
            plan.put(some, anew.plan)
        return dead

    def _compute_advantages(self, rule: AdvantageRule, mixed: Mixed) -> Bools:
        """Write advantages that are computed anew: over all rows of a group, or over stored and fresh ones apart,
        where a group is dead if its stored part is. Stored rows that are masked do not count; on fresh rows the hook
        decides again. Return which groups are dead then.

        Raises:
            SeamError: Those of the batch are not what TRL's rules make of its rewards.
        """
        plan = mixed.plan
        setting = self._settings.config.replay_advantages
        if not rule.explains_batch:
            if self._settings.config.replay_dry_run:
                return np.ones(len(plan), bool)
            raise SeamError(
                f"replay_advantages={setting!r} computes the advantages of mixed groups by "
                "TRL's rules, and those of this batch are others: the trainer shapes them by itself. Use "
                "replay_advantages='stored', or shape them in a plugin's trl_replay_advantages."
            )
        plan.masked = plan.masked & plan.stored
        rewards = mixed.column("row_rewards", mixed.groups.rewards)
        totals = mixed.column("row_total", mixed.groups.total)

        def by_rule(members: Bools, join: bool) -> tuple[Floats, Bools]:
            return rule(rewards, totals, members, members & (mixed.trainable > 0), join)

        counted = ~plan.masked
        if setting == "split":
            of_stored, dead = by_rule(plan.stored & counted, join=True)
            of_fresh, _ = by_rule(~plan.stored & counted, join=False)
            plan.advantages = np.where(plan.stored, of_stored, of_fresh)
        else:
            plan.advantages, dead = by_rule(counted, join=True)
        members = plan.stored if setting == "split" else np.ones_like(plan.stored)
        groups = mixed.as_groups(dead)
        groups = self.shape(replace(groups, dead=dead | alike_among(groups, members & counted)))
        plan.advantages, plan.masked = groups.advantages.copy(), groups.masked.copy()
        return groups.dead.copy()
