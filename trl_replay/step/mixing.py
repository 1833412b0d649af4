"""Advantages and masks of all rows, where a plugin shapes them or stored rows meet fresh ones.

Decided from columns alone, alike on all processes that share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch.group_view import TINY, AdvantageRule, reward_noise, teach_nothing
from ..components import Components
from ..counters import Tally
from ..decision import RowOutcome, Taken
from ..errors import ConfigurationError, SeamError
from ..settings import Settings
from ..table import Table
from ..types import NONE, Bools, Context, Floats, Groups, Ints
from .stages import FreshBatch


def shaped(fresh: Groups, given: Floats) -> Groups:
    """The fresh groups with a plugin's advantages.

    A group that was changed is dead if all of its rows that train have advantages next to 0: beside the batch's
    largest, and where it was dead before, beside its rewards, since a batch or a round may hold none that is larger.

    Args:
        fresh ([`Groups`]): As the trainer made them.
        given (`(n, G)`): Advantages; NaN for rows that train nothing.
    """
    left = given == fresh.advantages
    masked = np.isnan(given) | (left & fresh.masked)
    rounded = np.where(masked, 0.0, given).astype(np.float32).astype(np.float64)  # as they are trained on
    advantages = np.where(left, fresh.advantages, rounded)
    changed = replace(fresh, advantages=advantages, masked=masked)
    least = TINY * np.abs(advantages).max(initial=0.0)
    noise = reward_noise(fresh.rewards, fresh.reward_weights)
    least = np.where(fresh.dead, np.maximum(least, noise), least)
    touched = (~left | masked).any(axis=1)
    dead = np.where(touched, teach_nothing(advantages, changed.trains, least), fresh.dead)
    return replace(changed, dead=dead)


class Trained(NamedTuple):
    """Advantages and masks of some groups' rows, and which groups teach nothing then."""

    advantages: Floats
    """`(n, G)`; 0 for masked rows."""
    masked: Bools
    """`(n, G)`: rows that train nothing."""
    dead: Bools
    """`(n,)`."""

    def with_groups(self, places: Ints, others: Trained) -> Trained:
        """The same, but at `places` those of `others`."""
        mine = Trained(self.advantages.copy(), self.masked.copy(), self.dead.copy())
        for values, of_others in zip(mine, others, strict=True):
            values[places] = of_others
        return mine


@dataclass(frozen=True, slots=True)
class MixedGroups:
    """Slots with stored rows in the places of some or all of their rows, `n` groups of `G` rows.

    Attributes:
        slots ([`Groups`]): The fresh groups.
        used (`(entries,)` int64): The entries that give rows, as rows of the eligible table.
        table ([`Table`]): These entries alone.
        entries (`(n, G)` int64): Row of `table` whose entry takes each row; `NONE` for none.
        sources (`(n, G)` int64): Which of that entry's rows; `NONE` for none.
    """

    slots: Groups
    used: Ints
    table: Table
    entries: Ints
    sources: Ints

    @property
    def stored(self) -> Bools:
        """Marks stored rows, `(n, G)`."""
        return np.asarray(self.entries != NONE)

    @property
    def is_whole(self) -> Bools:
        """Tells whether one entry takes the whole slot, `(n,)`."""
        one_entry = (self.entries == self.entries[:, :1]).all(axis=1)
        return np.asarray(one_entry & self.stored[:, 0])

    @classmethod
    def of(cls, slots: Groups, table: Table, drawn: Ints, chosen: Ints) -> MixedGroups:
        """Takes what a mixer chose.

        Args:
            slots ([`Groups`]): The fresh groups.
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)`): Rows of `table`, -1 for none.
            chosen (`(n, G)`): For each row of a slot `e * G + r`, or -1.
        """
        size = chosen.shape[1]
        stored = chosen != NONE
        number = np.where(stored, chosen // size, 0)
        drawn_for_row = drawn[np.arange(len(drawn))[:, None], number]
        used = np.array(sorted(set(drawn_for_row[stored].tolist())), np.int64)
        entries = np.where(stored, np.searchsorted(used, drawn_for_row), NONE)
        sources = np.where(stored, chosen % size, NONE)
        return cls(slots, used, table.take(used), entries, sources)

    def silent(self) -> Bools:
        """Stored rows that train nothing, `(n, G)`, but for those of groups that are replayed whole."""
        trains = self.column("row_trains", self.stored)
        return np.asarray((trains == 0) & ~self.is_whole[:, None])

    def of_other_prompts(self) -> Bools:
        """Stored rows of other prompts than the slot's, `(n, G)`."""
        return np.asarray(self._of_entries(self.table.prompt) != self.slots.prompt[:, None])

    def without_rewards(self, each_function: bool) -> Bools:
        """Stored rows whose rewards are not known, `(n, G)`.

        Args:
            each_function (`bool`): Whether each function's reward counts, which a file that does not name its
                functions does not tell.
        """
        unknown = np.asarray(np.isnan(self.table.row_reward).all(axis=1))  # scored by functions of another run
        if each_function:
            unknown |= ~np.isnan(self.table.row_other_reward).all(axis=1)
        return self._of_entries(unknown)

    def _of_entries(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value of each stored row's entry, `(n, G)`."""
        if not len(values):
            return np.zeros(self.entries.shape, values.dtype)
        return np.asarray(values[self.entries])

    def without(self, rows: Bools, reason: str, tally: Tally) -> MixedGroups:
        """The same, but the fresh rows stay where stored ones would take these, `(n, G)`, which are counted."""
        tally.note(int((rows & self.stored).sum()), reason)
        entries = np.where(rows, NONE, self.entries)
        sources = np.where(rows, NONE, self.sources)
        return replace(self, entries=entries, sources=sources)

    def column(self, name: str, fresh: Floats | Ints | Bools) -> Floats:
        """A row column of the table where a row is a stored one, and what is given for fresh rows elsewhere: an array
        of its own."""
        if not len(self.used):
            return np.array(fresh)
        values = getattr(self.table, name)[self.entries, self.sources]
        stored = self.stored if values.ndim == 2 else self.stored[:, :, None]
        return np.asarray(np.where(stored, values, fresh))

    @property
    def trainable(self) -> Ints:
        """Trained tokens of each row, `(n, G)`."""
        return self.column("row_trainable", self.slots.trainable).astype(np.int64)

    def kept(self, largest: float) -> Trained:
        """Every row trains with its own advantage.

        A group that is replayed whole is dead if no row trains: a file's groups may be all right. Others are judged
        beside the largest advantage, and fresh rows of dead slots count for nothing.

        Args:
            largest (`float`): Of the fresh batch's advantages.
        """
        advantages = self.column("row_advantage", self.slots.advantages)
        masked = self.column("row_masked", self.slots.masked).astype(bool, copy=False)
        trains = (self.trainable > 0) & ~masked
        counted = np.where(self.stored | ~self.slots.dead[:, None], advantages, 0.0)
        largest = np.abs(counted).max(initial=largest)
        least = np.where(self.is_whole, 0.0, TINY * largest)
        return Trained(advantages, masked, teach_nothing(counted, trains, least))

    def computed(self, rule: AdvantageRule, masked: Bools, split: bool) -> Trained:
        """Advantages anew, over the rows of each group that are not `masked`, `(n, G)`: over all of them, or over
        stored and fresh ones apart, where a group is dead if its stored part is."""
        if not split:
            advantages, dead = self._by_rule(rule, ~masked, join=True)
            return Trained(advantages, masked, dead)
        of_stored, dead = self._by_rule(rule, self.stored & ~masked, join=True)
        of_fresh, _ = self._by_rule(rule, ~self.stored & ~masked, join=False)
        return Trained(np.where(self.stored, of_stored, of_fresh), masked, dead)

    def _by_rule(self, rule: AdvantageRule, members: Bools, join: bool) -> tuple[Floats, Bools]:
        rewards = self.column("row_rewards", self.slots.rewards)
        totals = self.column("row_reward", self.slots.reward)
        return rule(rewards, totals, members, members & (self.trainable > 0), join)

    def _named_rewards(self) -> Floats:
        """`(n, G, functions)`: raw rewards. That of a file which does not name its functions stands in the place of
        the first one that has a weight, so that the weighted sum is right."""
        rewards = self.column("row_rewards", self.slots.rewards)
        other = self.column("row_other_reward", np.full(self.stored.shape, np.nan))
        weights = self.slots.reward_weights
        weighted = np.flatnonzero(weights)
        if np.isnan(other).all() or not len(weighted):
            return rewards
        first = weighted[0]
        rewards[..., first] = np.where(np.isnan(other), rewards[..., first], other / weights[first])
        return rewards

    def as_groups(self, trained: Trained) -> Groups:
        """The mixed groups as a plugin sees them."""
        return replace(
            self.slots,
            rewards=self._named_rewards(),
            advantages=trained.advantages,
            lengths=self.column("row_length", self.slots.lengths).astype(np.int64),
            trainable=self.trainable,
            items=self.column("row_items", self.slots.items).astype(np.int64),
            dead=trained.dead,
            behavior_logps=None,
            masked=trained.masked,
        )

    def take(self, chosen: Ints) -> MixedGroups:
        """The groups at `chosen`."""
        entries = self.entries[chosen]
        return MixedGroups(self.slots.take(chosen), self.used, self.table, entries, self.sources[chosen])


@dataclass(frozen=True, slots=True)
class Filling:
    """Slots, what stored rows take of them, and what their rows train with then.

    Attributes:
        slots (`list[int]`): `n` slots, in the selector's order.
        mixed ([`MixedGroups`]): Their rows.
        advantages (`(n, G)`): 0 for masked rows.
        masked (`(n, G)` bool): Rows that train nothing.
        computed (`(n,)` bool): Whether advantages were computed anew, for all rows of the slot.
    """

    slots: list[int]
    mixed: MixedGroups
    advantages: Floats
    masked: Bools
    computed: Bools

    def take(self, chosen: Ints) -> Filling:
        """The slots at `chosen`, distinct and in order."""
        return Filling(
            [self.slots[number] for number in chosen.tolist()],
            self.mixed.take(chosen),
            self.advantages[chosen],
            self.masked[chosen],
            self.computed[chosen],
        )

    def outcome(self, fresh: Groups) -> RowOutcome:
        """Returns what all rows of the batch train with."""
        advantages = fresh.advantages.copy()
        masked = fresh.masked.copy()
        computed = np.zeros(masked.shape, bool)
        advantages[self.slots] = self.advantages
        masked[self.slots] = self.masked
        computed[self.slots] = self.computed[:, None]
        return RowOutcome(advantages, masked, computed)

    def taken(self, rows: Ints, update: int, priorities: Floats) -> list[Taken]:
        """Lists what stored rows take, slot by slot and entry by entry.

        Args:
            rows (`(entries,)`): Row of the buffer's table of each eligible entry.
            update (`int`): Updates done.
            priorities (`(used,)`): The chance of each entry that gives rows to be drawn first, relative to the least
                likely one's.
        """
        table = self.mixed.table
        found = []
        for slot, entries, sources in zip(self.slots, self.mixed.entries, self.mixed.sources, strict=True):
            for entry in dict.fromkeys(entries[entries != NONE].tolist()):
                targets = np.flatnonzero(entries == entry)
                taken = Taken(
                    slot=slot,
                    serial=int(table.serial[entry]),
                    row=int(rows[self.mixed.used[entry]]),
                    age=update - int(table.update[entry]),
                    priority=float(priorities[entry]),
                    targets=targets,
                    sources=sources[targets],
                )
                found.append(taken)
        return found


class Mixing:
    """Lets plugins shape advantages and a mixer put stored rows beside fresh ones, and decides what all rows train
    with.

    Args:
        components ([`Components`]): The hooks, and whether the loss may go around the tap.
        context (`Callable`): Gives what strategies may know at this moment.
        settings ([`Settings`]): How advantages of mixed groups are made.
    """

    def __init__(self, components: Components, context: Callable[..., Context], settings: Settings) -> None:
        self._hooks = components.hooks
        self._forward = components.forward
        self._context = context
        self._settings = settings

    def shape(self, groups: Groups) -> Groups:
        """Lets a plugin shape the advantages of fresh rows, before anything is decided by them, and of those that
        were computed for mixed groups."""
        given = None if self._settings.dry_run else self._hooks.advantages(groups, self._context())
        if given is not None:
            groups = shaped(groups, given)
        self._refuse_masks_beside_the_tap(groups.masked)
        return groups

    def _refuse_masks_beside_the_tap(self, masked: Bools) -> None:
        if masked.any() and self._forward:
            raise ConfigurationError(
                "An advantage is NaN (in a plugin's trl_replay_advantages, or the trainer's own), which masks "
                "rows inside the loss's log-prob method; "
                "use_liger_kernel=True goes around that: give 0 instead, or use use_liger_kernel=False."
            )

    def mix(self, fresh: FreshBatch, slots: list[int], table: Table, drawn: Ints, most: int, tally: Tally) -> Filling:
        """Decides which stored rows take which rows of the slots, and what all of their rows train with.

        Args:
            fresh ([`FreshBatch`]): The batch.
            slots (`list[int]`): For which something was drawn.
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)`): Rows of `table`.
            most (`int`): So many slots at most: the first of those that can be filled.
            tally ([`Tally`]): Counts why rows and slots stay fresh.

        Returns:
            Those of the slots that take a stored row and would not be dead.
        """
        view = fresh.groups.take(slots)
        chosen = self._hooks.mix(table, drawn, view, self._context(view))
        mixed = MixedGroups.of(view, table, drawn, chosen)
        setting = self._settings.advantages
        computed = ~mixed.is_whole if setting == "auto" else np.full(len(view), setting != "stored")
        mixed = self._fitting(mixed, computed, fresh.rule, tally)
        trained = self._trained(fresh, mixed, computed)
        some = np.asarray(mixed.stored.any(axis=1))
        tally.note(int((~some).sum()), "the mixer took no stored row for a slot")
        what = "the stored rows alone" if setting == "split" else "a mixed group"
        tally.note(int((some & trained.dead).sum()), f"{what} would have been dead")
        filling = Filling(slots, mixed, trained.advantages, trained.masked, computed)
        kept = filling.take(np.flatnonzero(some & ~trained.dead)[:most])
        if fresh.rule.spans_batch and kept.computed.any() and len(kept.slots) < len(slots):
            return self._without_slots_left_fresh(fresh, kept)
        return kept

    def _without_slots_left_fresh(self, fresh: FreshBatch, filling: Filling) -> Filling:
        """The same slots, with a deviation of the batch that no slot left fresh counts in twice."""
        trained = self._trained(fresh, filling.mixed, filling.computed)
        return replace(filling, advantages=trained.advantages, masked=trained.masked)

    def _fitting(self, mixed: MixedGroups, computed: Bools, rule: AdvantageRule, tally: Tally) -> MixedGroups:
        """The mixed groups without stored rows that can't stand beside others.

        Args:
            mixed ([`MixedGroups`]): As the mixer wants them.
            computed (`(n,)` bool): Slots whose advantages are computed anew.
            rule ([`AdvantageRule`]): How.
            tally ([`Tally`]): Counts what is left out.
        """
        anew = computed[:, None]
        unknown = mixed.without_rewards(rule.takes_functions_apart) & anew
        reason = "a stored row can't be mixed: its rewards are not known, or not of each function"
        mixed = mixed.without(unknown, reason, tally)
        reason = f"{self._hooks.giver} chose a stored row that trains nothing: the fresh row stays"
        mixed = mixed.without(mixed.silent(), reason, tally)
        reason = "a stored row of another prompt can't share the slot's baseline"
        return mixed.without(mixed.of_other_prompts() & anew, reason, tally)

    def _trained(self, fresh: FreshBatch, mixed: MixedGroups, computed: Bools) -> Trained:
        """Returns what the rows of mixed groups train with, computed anew where `computed`, `(n,)`, says so."""
        kept = mixed.kept(np.abs(fresh.groups.advantages).max(initial=0.0))
        if not computed.any():
            return kept
        some = np.flatnonzero(computed)
        anew = self._computed(fresh.rule, mixed.take(some), kept.masked[some])
        return kept.with_groups(some, anew)

    def _computed(self, rule: AdvantageRule, mixed: MixedGroups, masked: Bools) -> Trained:
        """The same, computed anew over all rows but stored ones that are masked: on fresh rows the hook decides again.

        Raises:
            SeamError: Those of the batch are not what TRL's rules make of its rewards.
        """
        if not rule.explains_batch:
            if self._settings.dry_run:
                return Trained(mixed.slots.advantages, masked, np.ones(len(masked), bool))
            raise SeamError(
                f"replay_advantages={self._settings.advantages!r} computes the advantages of mixed groups by "
                "TRL's rules, and those of this batch are others: the trainer shapes them by itself. Use "
                "replay_advantages='stored', or shape them in a plugin's trl_replay_advantages."
            )
        trained = mixed.computed(rule, masked & mixed.stored, split=self._settings.advantages == "split")
        view = self.shape(mixed.as_groups(trained))
        return Trained(view.advantages, view.masked, view.dead)
