"""What every row of the composed batch trains with, where a plugin shapes advantages or stored rows meet fresh ones.

Decided from columns alone, alike on all processes that share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..batch.group_view import TINY, AdvantageRule, reward_noise, teach_nothing
from ..components import Components
from ..errors import ConfigurationError, SeamError
from ..plan import Plan, RowOutcome, Taken
from ..settings import Settings
from ..table import Table
from ..types import NONE, Bools, Context, Floats, Groups, Ints


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
    touched = (~left | masked).any(axis=1)
    given_groups = replace(fresh, advantages=advantages, masked=masked)
    trains = given_groups.trains
    nothing = teach_nothing(advantages, trains, TINY * np.abs(advantages).max(initial=0.0))
    noise = reward_noise(fresh.rewards, fresh.reward_weights)
    nothing |= fresh.dead & teach_nothing(advantages, trains, noise)
    return replace(given_groups, dead=np.where(touched, nothing, fresh.dead))


def untouched(fresh: Groups) -> RowOutcome:
    """What the fresh rows train with as they are."""
    nowhere = np.zeros(fresh.advantages.shape, bool)
    return RowOutcome(fresh.advantages.copy(), fresh.masked.copy(), nowhere)


@dataclass(slots=True)
class MixedGroups:
    """Slots with stored rows in the places of some or all of their rows, `n` groups of `G` rows.

    Attributes:
        slots ([`Groups`]): The fresh groups.
        used (`(entries,)` int64): The entries that give rows, as rows of the eligible table.
        table ([`Table`]): These entries alone.
        entries (`(n, G)` int64): Row of `table` whose entry takes each row; `NONE` for none.
        sources (`(n, G)` int64): Which of that entry's rows; `NONE` for none.
        stored (`(n, G)` bool): Which rows are stored ones.
        is_whole (`(n,)` bool): Whether one entry takes the whole slot.
    """

    slots: Groups
    used: Ints
    table: Table
    entries: Ints
    sources: Ints
    stored: Bools = field(init=False)
    is_whole: Bools = field(init=False)

    def __post_init__(self) -> None:
        self._mark()

    def _mark(self) -> None:
        self.stored = self.entries != NONE
        one_entry = (self.entries == self.entries[:, :1]).all(axis=1)
        self.is_whole = one_entry & self.stored[:, 0]

    @classmethod
    def of(cls, slots: Groups, table: Table, drawn: Ints, chosen: Ints) -> MixedGroups:
        """What a mixer chose.

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

    def leave_silent(self) -> int:
        """Reverts stored rows that train nothing to fresh ones, but for groups that are replayed whole; returns their
        number."""
        if self.is_whole.all():
            return 0
        silent = self.column("row_trains", self.stored) == 0
        return self._leave(silent & ~self.is_whole[:, None])

    def leave_other_prompts(self, chosen: Bools) -> int:
        """Takes stored rows of other prompts than the slot's out of the `chosen` slots, `(n,)`; returns how many."""
        if not len(self.used):
            return 0
        prompts = self.table.prompt[self.entries]
        other = prompts != self.slots.prompt[:, None]
        return self._leave(other & chosen[:, None])

    def leave_unknown(self, computed: Bools, each_function: bool) -> int:
        """Takes rows out of which too little is known; returns how many.

        Args:
            computed (`(n,)` bool): Slots whose advantages are computed anew, by the rewards of their rows.
            each_function (`bool`): Whether each function's reward counts, which a file that does not name its
                functions does not tell.
        """
        if not len(self.used) or not computed.any():
            return 0
        unknown = np.asarray(np.isnan(self.table.row_reward).all(axis=1))  # scored by functions of another run
        if each_function:
            unknown |= ~np.isnan(self.table.row_other_reward).all(axis=1)
        return self._leave(unknown[self.entries] & computed[:, None])

    def _leave(self, rows: Bools) -> int:
        """Lets the fresh rows stay where stored ones would take these, `(n, G)`; returns how many stored ones."""
        left = rows & self.stored
        self.entries = np.where(left, NONE, self.entries)
        self.sources = np.where(left, NONE, self.sources)
        self._mark()
        return int(left.sum())

    def column(self, name: str, fresh: Floats | Ints | Bools) -> Floats:
        """A row column of the table where a row is a stored one, and what is given for fresh rows elsewhere: an array
        of its own."""
        if not len(self.used):
            return np.array(fresh)
        values = getattr(self.table, name)[self.entries, self.sources]
        stored = self.stored if values.ndim == 2 else self.stored[:, :, None]
        return np.asarray(np.where(stored, values, fresh))

    def kept(self) -> tuple[Floats, Bools]:
        """Advantages and masks where every row keeps its own, `(n, G)`."""
        advantages = self.column("row_advantage", self.slots.advantages)
        masked = self.column("row_masked", self.slots.masked).astype(bool, copy=False)
        return advantages, masked

    @property
    def trainable(self) -> Ints:
        """Trained tokens of each row, `(n, G)`."""
        return self.column("row_trainable", self.slots.trainable).astype(np.int64)

    def joint(self, rule: AdvantageRule, train: Bools) -> tuple[Floats, Bools]:
        """Advantages over all rows of each mixed group that `train`, `(n, G)`, and which groups are dead, `(n,)`."""
        return self._computed(rule, train)

    def split(self, rule: AdvantageRule, train: Bools) -> tuple[Floats, Bools]:
        """Advantages over the fresh and the stored rows of each group apart, `(n, G)`, and which groups have a dead
        stored part, `(n,)`."""
        of_stored, dead = self._computed(rule, self.stored & train)
        of_fresh, _ = self._computed(rule, ~self.stored & train)
        return np.where(self.stored, of_stored, of_fresh), dead

    def _computed(self, rule: AdvantageRule, members: Bools) -> tuple[Floats, Bools]:
        rewards = self.column("row_rewards", self.slots.rewards)
        totals = self.column("row_reward", self.slots.reward)
        return rule(rewards, totals, members, members & (self.trainable > 0))

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

    def as_groups(self, advantages: Floats, dead: Bools, masked: Bools) -> Groups:
        """The mixed groups as a plugin sees them."""
        items = self.slots.trainable if self.slots.items is None else self.slots.items
        return replace(
            self.slots,
            rewards=self._named_rewards(),
            advantages=advantages,
            lengths=self.column("row_length", self.slots.lengths).astype(np.int64),
            trainable=self.trainable,
            items=self.column("row_items", items).astype(np.int64),
            dead=dead,
            behavior_logps=None,
            masked=masked,
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
        if len(chosen) == len(self.slots):
            return self
        return Filling(
            [self.slots[number] for number in chosen.tolist()],
            self.mixed.take(chosen),
            self.advantages[chosen],
            self.masked[chosen],
            self.computed[chosen],
        )

    def within(self, slots: int, entries: int) -> Filling:
        """The first of them, no more than so many slots and entries."""
        if len(self.slots) <= slots and self.mixed.entries.size <= entries:
            return self
        ordered = np.sort(self.mixed.entries, axis=1)
        begins = np.diff(ordered, axis=1, prepend=NONE) > 0
        numbers = begins.sum(axis=1)  # distinct entries of each slot
        fitting = int((np.cumsum(numbers) <= entries).sum())
        return self.take(np.arange(min(slots, fitting, len(self.slots))))

    def write(self, outcome: RowOutcome) -> None:
        """Puts down what the slots' rows train with."""
        outcome.advantages[self.slots] = self.advantages
        outcome.masked[self.slots] = self.masked
        outcome.computed[self.slots] = self.computed[:, None]

    def taken(self, rows: Ints, update: int, priorities: Floats) -> list[Taken]:
        """What stored rows take, slot by slot and entry by entry.

        Args:
            rows (`(entries,)`): Row of the buffer's table of each eligible entry.
            update (`int`): Updates done.
            priorities (`(used,)`): The chance of each entry that gives rows to be drawn first, relative to the least
                likely one's.
        """
        serials: list[int] = self.mixed.table.serial.tolist()
        updates: list[int] = self.mixed.table.update.tolist()
        used: list[int] = rows[self.mixed.used].tolist()
        chances: list[float] = priorities.tolist()
        found = []
        all_rows = np.arange(self.mixed.entries.shape[1])
        whole: list[bool] = self.mixed.is_whole.tolist()
        rows_of_slots = zip(self.slots, whole, self.mixed.entries, self.mixed.sources, strict=True)
        for slot, is_whole, entries, sources in rows_of_slots:
            targets_of = {int(entries[0]): all_rows} if is_whole else _rows_by_entry(entries)
            for entry, targets in targets_of.items():
                taken = Taken(
                    slot=slot,
                    serial=serials[entry],
                    row=used[entry],
                    age=update - updates[entry],
                    priority=chances[entry],
                    targets=targets,
                    sources=sources[targets],
                )
                found.append(taken)
        return found


def _rows_by_entry(entries: Ints) -> dict[int, Ints]:
    """The rows of a slot that each entry takes, in the order of their first rows."""
    taken = dict.fromkeys(entries[entries != NONE].tolist())
    return {entry: np.flatnonzero(entries == entry) for entry in taken}


class Mixing:
    """Lets plugins shape advantages and a mixer put stored rows beside fresh ones, and decides what all rows train
    with.

    Args:
        components ([`Components`]): The hooks, and whether the loss may go around the tap.
        context (`Callable`): Gives what strategies may know at this moment.
        settings ([`Settings`]): How advantages of mixed groups are made.
    """

    def __init__(self, components: Components, context: Callable[[], Context], settings: Settings) -> None:
        self._hooks = components.hooks
        self._forward = components.forward
        self._context = context
        self._settings = settings

    def shape(self, groups: Groups) -> Groups:
        """What a plugin makes of the advantages of fresh rows, before anything is decided by them, and of those that
        were computed for mixed groups."""
        given = None if self._settings.dry_run else self._hooks.advantages(groups, self._context())
        if given is None:
            return groups
        groups = shaped(groups, given)
        self._refuse_masks_beside_the_tap(groups.masked)
        return groups

    def _refuse_masks_beside_the_tap(self, masked: Bools) -> None:
        if masked.any() and self._forward:
            raise ConfigurationError(
                "A plugin's trl_replay_advantages gave NaN, which masks rows inside the loss's log-prob method; "
                "use_liger_kernel=True goes around that: give 0 instead, or use use_liger_kernel=False."
            )

    def mix(self, plan: Plan, slots: list[int], table: Table, drawn: Ints, context: Context) -> Filling:
        """Which stored rows take which rows of the slots, and what all of their rows train with.

        Args:
            plan ([`Plan`]): With `fresh` and `rule`.
            slots (`list[int]`): For which something was drawn.
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)`): Rows of `table`.
            context ([`Context`]): With the fresh groups of these slots.

        Returns:
            Those of the slots that take a stored row and would not be dead.
        """
        view = context.slots
        assert view is not None
        chosen = self._hooks.mix(table, drawn, view, context)
        mixed = MixedGroups.of(view, table, drawn, chosen)
        reasons = plan.tally.reasons
        setting = self._settings.advantages
        computed = ~mixed.is_whole if setting == "auto" else np.full(len(view), setting != "stored")
        rule = plan.rule
        unknown = mixed.leave_unknown(computed, rule is not None and rule.takes_functions_apart)
        if unknown:
            reasons["a stored row can't be mixed: its rewards are not known, or not of each function"] += unknown
        silent = mixed.leave_silent()
        if silent:
            reasons[f"{self._hooks.giver} chose a stored row that trains nothing: the fresh row stays"] += silent
        if computed.any():
            others = mixed.leave_other_prompts(computed)
            if others:
                reasons["a stored row of another prompt can't share the slot's baseline"] += others
        advantages, masked, dead = self._advantages(plan, mixed, computed)
        some = mixed.stored.any(axis=1)
        if not some.all():
            reasons["the mixer took no stored row for a slot"] += int((~some).sum())
        if (some & dead).any():
            what = "the stored rows alone" if setting == "split" else "a mixed group"
            reasons[f"{what} would have been dead"] += int((some & dead).sum())
        usable = np.flatnonzero(some & ~dead)
        return Filling(slots, mixed, advantages, masked, computed).take(usable)

    def _advantages(self, plan: Plan, mixed: MixedGroups, computed: Bools) -> tuple[Floats, Bools, Bools]:
        """What the rows of mixed groups train with, `(n, G)` advantages and masks, and which groups are dead, `(n,)`;
        computed anew where `computed`, `(n,)`, says so."""
        fresh = plan.fresh
        assert fresh is not None
        advantages, masked = mixed.kept()
        trains = (mixed.trainable > 0) & ~masked
        taught = trains & (advantages != 0)
        dead = ~(mixed.is_whole & taught.any(axis=1))  # no row trains in a file's groups that are all right
        if dead.any():
            counted = np.where(mixed.stored | ~mixed.slots.dead[:, None], advantages, 0.0)
            largest = np.abs(np.concatenate([fresh.advantages, counted])).max(initial=0.0)
            dead &= teach_nothing(counted, trains, TINY * largest)
        if computed.any():
            some = np.flatnonzero(computed)
            anew = self._computed(plan, mixed.take(some), masked[some])
            advantages[some], masked[some], dead[some] = anew
        return advantages, masked, dead

    def _computed(self, plan: Plan, mixed: MixedGroups, masked: Bools) -> tuple[Floats, Bools, Bools]:
        """The same, computed anew over all rows but stored ones that are masked: on fresh rows the hook decides again.

        Raises:
            SeamError: Those of the batch are not what TRL's rules make of its rewards.
        """
        rule = plan.rule
        assert rule is not None
        if not rule.explains_batch:
            if self._settings.dry_run:
                return mixed.slots.advantages, masked, np.ones(len(masked), bool)
            raise SeamError(
                f"replay_advantages={self._settings.advantages!r} computes the advantages of mixed groups by "
                "TRL's rules, and those of this batch are others: the trainer shapes them by itself. Use "
                "replay_advantages='stored', or shape them in a plugin's trl_replay_advantages."
            )
        masked = masked & mixed.stored
        train = ~masked
        splits = self._settings.advantages == "split"
        advantages, dead = mixed.split(rule, train) if splits else mixed.joint(rule, train)
        view = self.shape(mixed.as_groups(advantages, dead, masked))
        return view.advantages, view.masked, view.dead
