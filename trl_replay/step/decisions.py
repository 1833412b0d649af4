"""What is decided for a batch, from columns alone, without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.groups import AdvantageFormula, Block, Candidate, PendingGroups, least_size, teach_nothing
from ..buffer import Newcomer
from ..buffer.replay_buffer import OTHER_RULE, SOLVED
from ..data.counters import Tally
from ..data.plan import EMPTY, Plan
from ..data.rewards import have_equal_rewards, reward_noise
from ..data.table import Table
from ..data.types import NONE, Batch, Bools, Floats, Groups, Ints
from ..distributed.communicator import Admitted, Decision, SharedRows
from ..errors import SeamError
from ..loss.tap import Handshake
from ..setup.settings import Components, Settings


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A generation batch, of which no group will be generated again.

    Attributes:
        batch (`dict`): This process's rows as TRL returned them, texts on the CPU, with the advantages that a plugin
            gave them.
        given (`dict`): As TRL returned them, on its device.
        on_cpu (`dict`): The copies of these on the CPU, which `batch` has where nothing was changed.
        rows ([`SharedRows`]): Where they lie.
        groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        generations (`tuple[Groups, ...]`): The groups of all rounds of generation.
        refilled (`int`): How many of the groups are of further rounds.
        formula ([`AdvantageFormula`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        recorded ([`Block`], *optional*): Log-probs that are stored without being seen by the loss (`replay_record`).
        logps_known (`bool`): Whether its log-probs are known before the loss sees its rows.
    """

    batch: Batch
    given: Batch
    on_cpu: Batch
    rows: SharedRows
    groups: Groups
    generations: tuple[Groups, ...]
    refilled: int
    formula: AdvantageFormula
    keys: frozenset[str]
    recorded: Block | None
    logps_known: bool

    @property
    def surplus(self) -> int:
        """Number of groups of further rounds that took no slot."""
        return sum(len(groups) for groups in self.generations[1:]) - self.refilled

    def emptied(self) -> ScoredBatch:
        """The batch with every slot to be filled."""
        dead = np.ones(len(self.groups), bool)
        return replace(self, groups=replace(self.groups, dead=dead))


def shown(groups: Groups) -> Floats:
    """Return the advantages that a plugin is shown: 0 where dead groups have equal rewards, instead of rounding
    errors, which are no advantages when they are scaled either."""
    is_noise = groups.dead & have_equal_rewards(groups.rewards, groups.reward_weights)
    return np.where(is_noise[:, None], 0.0, groups.advantages)


def shaped(new_groups: Groups, seen: Floats, given: Floats) -> Groups:
    """The fresh groups with a plugin's advantages.

    A group that was changed is dead if all of its rows that train have advantages next to 0: beside the batch's
    largest, and where it was dead before, beside its rewards, since a batch or a round may hold none that is larger,
    and beside what TRL's rounding left of rows that the plugin left alone. A group that is dead by the function that
    counts stays so, unless the plugin has given rows of several advantages, or of none, one of its own. Masked rows
    stay masked.

    Args:
        new_groups ([`Groups`]): As the trainer made them.
        seen (`(n, G)`): Advantages that the plugin was shown: a row to which it gives the same keeps the trainer's.
        given (`(n, G)`): Advantages; NaN for rows that train nothing.
    """
    left = given == seen
    masked = np.isnan(given) | new_groups.masked
    rounded = np.where(masked, 0.0, given).astype(np.float32).astype(np.float64)  # as they are trained on
    advantages = np.where(left, new_groups.advantages, rounded)
    changed = replace(new_groups, advantages=advantages, masked=masked)
    least: Floats | float = least_size(advantages, new_groups.advantages[~new_groups.dead])
    noise = reward_noise(new_groups.rewards, new_groups.reward_weights)
    rounding = np.where(left & changed.trains, np.abs(new_groups.advantages), 0.0).max(axis=1)
    least = np.where(new_groups.dead, np.maximum(np.maximum(least, noise), rounding), least)
    touched = (~left | masked).any(axis=1)
    dead = np.where(touched, teach_nothing(advantages, changed.trains, least), new_groups.dead)
    had_one = _are_equal(seen, changed.trains) & ~teach_nothing(seen, changed.trains, least)
    is_given = _are_equal(advantages, changed.trains) & ~had_one
    return replace(changed, dead=dead | (changed.alike & ~is_given))


def _are_equal(advantages: Floats, trains: Bools) -> Bools:
    """Groups all of whose rows that train have the same advantage, `(n,)`."""
    highest = np.where(trains, advantages, -np.inf).max(axis=1)
    lowest = np.where(trains, advantages, np.inf).min(axis=1)
    return np.asarray(highest == lowest)


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
        return Mixed(self.groups.take(slots), self.used, self.table, self.plan.take(slots), self.computed[slots])

    def lacks_a_function(self) -> Bools:
        """Tell which rows' entries and fresh groups were not scored by the same functions, `(n, G)`: sums with and
        without one have no baseline in common. A checkpoint's entries lack a function that is new."""
        stored = np.asarray(~np.isnan(self.table.row_rewards).all(axis=1))  # (entries, functions)
        fresh = np.asarray(~np.isnan(self.groups.rewards).all(axis=1))  # (n, functions)
        lacking = np.zeros(self.plan.entry.shape, bool)
        for function in np.flatnonzero(self.groups.reward_weights):
            lacking |= self.of_entries(stored[:, function]) != fresh[:, [function]]
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
        seen = shown(groups)
        given = self._hooks.advantages(replace(groups, advantages=seen), self._context())
        return groups if given is None else shaped(groups, seen, given)

    def mix(
        self, scored: ScoredBatch, slots: Ints, table: Table, drawn: Ints, most: int, tally: Tally
    ) -> tuple[Ints, Mixed]:
        """Decide which stored rows take which rows of the slots, and what all of their rows train with.

        Args:
            scored ([`ScoredBatch`]): The batch.
            slots (`(n,)`): For which something was drawn.
            table ([`Table`]): The eligible entries.
            drawn (`(n, k)`): Rows of `table`.
            most (`int`): So many slots at most: the first of those that can be filled.
            tally ([`Tally`]): Counts why rows and slots stay fresh.

        Returns:
            Those of the slots that take a stored row and would not be dead, and their plan.
        """
        groups = scored.groups.take(slots)
        setting = self._settings.config.replay_advantages
        chosen = self._hooks.mix(table, drawn, groups, self._context(groups))
        mixed = planned(groups, table, drawn, chosen, setting)
        self._keep_fresh(mixed, tally)
        dead = self._set_advantages(scored, mixed)
        some = mixed.plan.stored.any(axis=1)
        tally.note(int((~some).sum()), "the mixer took no stored row for a slot")
        what = "the stored rows alone" if setting == "split" else "a mixed group"
        tally.note(int((some & dead).sum()), f"{what} would have been dead")
        kept = np.flatnonzero(some & ~dead)[:most]
        mixed = mixed.take(kept)
        if scored.formula.spans_batch and mixed.computed.any() and len(kept) < len(slots):
            self._set_advantages(scored, mixed)  # a slot left fresh counts once in the batch's deviation
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
            "a stored row can't be mixed: its rewards are not known, or not of the functions that scored fresh ones": (
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

    def _set_advantages(self, scored: ScoredBatch, mixed: Mixed) -> Bools:
        """Write what the rows train with: their own advantages, or new ones where these are computed. Return which
        groups are dead then, `(n,)`.

        A group that is replayed whole is dead if no row trains: a file's groups may be all right. Others are judged
        beside the largest advantage, and fresh rows of dead slots count for nothing.
        """
        plan = mixed.plan
        plan.advantages = mixed.column("row_advantage", mixed.groups.advantages).astype(np.float64)
        plan.masked = mixed.column("row_masked", mixed.groups.masked)
        counted = np.where(plan.stored | ~mixed.groups.dead[:, None], plan.advantages, 0.0)
        of_batch = scored.groups.advantages
        least = least_size(np.concatenate([counted, of_batch]), of_batch[~scored.groups.dead])
        trains = (mixed.trainable > 0) & ~plan.masked
        dead = teach_nothing(counted, trains, np.where(plan.is_whole, 0.0, least))
        some = np.flatnonzero(mixed.computed)
        if len(some):
            anew = mixed.take(some)
            dead[some] = self._compute_advantages(scored.formula, anew)
            plan.put(some, anew.plan)
        return dead

    def _compute_advantages(self, formula: AdvantageFormula, mixed: Mixed) -> Bools:
        """Write advantages that are computed anew: over all rows of a group, or over stored and fresh ones apart,
        where a group is dead if its stored part is. Stored rows that are masked do not count; on fresh rows the hook
        decides again. Return which groups are dead then.

        Raises:
            SeamError: Those of the batch are not what TRL's rules make of its rewards.
        """
        plan = mixed.plan
        setting = self._settings.config.replay_advantages
        if not formula.explains_batch:
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
            return formula(rewards, totals, members, members & (mixed.trainable > 0), join)

        counted = ~plan.masked
        if setting == "split":
            of_stored, dead = by_rule(plan.stored & counted, join=True)
            of_fresh, _ = by_rule(~plan.stored & counted, join=False)
            plan.advantages = np.where(plan.stored, of_stored, of_fresh)
        else:
            plan.advantages, dead = by_rule(counted, join=True)
        members = plan.stored if setting == "split" else np.ones_like(plan.stored)
        computed = mixed.as_groups(dead)
        of_members = replace(computed, rewards=np.where((members & counted)[..., None], computed.rewards, np.nan))
        computed = replace(computed, dead=dead | of_members.alike)
        groups = self.shape(computed)
        plan.advantages, plan.masked = groups.advantages.copy(), groups.masked.copy()
        if groups is not computed:  # a plugin has shaped rows of either kind
            judged = replace(of_members, dead=computed.dead, masked=groups.masked | ~members)
            groups = shaped(judged, shown(computed), groups.advantages)
        return groups.dead.copy()


ALL_LIVE = "no group was dead: nothing to replace"
NONE_CHOSEN = "no group of the batch was replaceable (the selector chose none)"
KEPT_WRONG = "all-wrong groups stay: replay_kl='all_wrong' trains their KL term, and no other group was replaceable"
KEPT_LOWEST = (
    "dead groups at the lowest reward seen stay: replay_kl='all_wrong' trains their KL term, and no other group was "
    "replaceable"
)
TOO_EARLY = "nothing is replayed before the first loss: it shows whether replayed rows are corrected"


class Decisions:
    """The decisions of one session.

    Args:
        components ([`Components`]): Of the buffer only the table changes here; payload moves later.
        handshake ([`Handshake`]): Whether the seam has been seen to work.
        settings ([`Settings`]): Limits.

    Attributes:
        mixing ([`Mixing`]): Decides what rows train with.
        rescored (`int`): Entries that left for another reward rule, and are not counted yet.
    """

    def __init__(self, components: Components, handshake: Handshake, settings: Settings) -> None:
        self._buffer = components.buffer
        self._hooks = components.hooks
        self._success = components.success
        self._processes = components.processes
        self._mixes_rows = components.mixes_rows
        self.mixing = Mixing(components, settings)
        self._handshake = handshake
        self._context = components.buffer.context
        self._settings = settings
        self.rescored = 0

    def settle(
        self, pending: PendingGroups | None, rows: SharedRows, generations: Sequence[Groups], tally: Tally
    ) -> Admitted:
        """Settle the last generation batch's candidates.

        Args:
            pending ([`PendingGroups`], *optional*): These, if there are any.
            rows ([`SharedRows`]): Of the batch at hand; its columns tell of the last one's candidates, too.
            generations (`Sequence[Groups]`): The groups of every generation of the batch at hand.
            tally ([`Tally`]): Counts what happens.
        """
        tally.retire(self.rescored, OTHER_RULE)
        self.rescored = 0
        solved = self._buffer.observe(generations, tally)
        usable, groups = ([], None) if pending is None else pending.admissible(rows.columns, tally)
        if groups is None:
            return Admitted()
        sizes = rows.sizes([candidate.slot for candidate in usable])
        newcomers = [Newcomer(one.serial, nbytes, one.keys) for one, nbytes in zip(usable, sizes, strict=True)]
        kept = self._buffer.extend(groups, newcomers, tally, solved)
        return self._admitted([candidate for candidate in usable if candidate.serial in kept], rows)

    def fill_batch(self, scored: ScoredBatch, pending: PendingGroups | None, collected_at: int | None) -> Decision:
        """Choose what is replayed in the fresh batch, and which of its groups become candidates.

        Args:
            scored ([`ScoredBatch`]): The batch.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
        """
        tally = Tally(refilled=scored.refilled, surplus=scored.surplus)
        admitted = self.settle(pending, scored.rows, scored.generations, tally)
        slots, most = self.select(scored.groups, tally)
        plan, priorities = self._fill_slots(scored, slots, most, collected_at, tally)
        self._book(scored.groups, plan, tally)
        if self._settings.config.replay_dry_run:
            plan = Plan.of(scored.groups)
            plan.masked[:] = False  # as the trainer has it
        else:
            self._treat(scored, plan, 0, tally)
        return Decision(tally, admitted, plan, priorities, self._candidate_slots(scored, plan, tally))

    def fill_iteration(
        self,
        scored: ScoredBatch,
        rows: SharedRows,
        pending: PendingGroups | None,
        collected_at: int | None,
        iteration: int,
    ) -> Decision:
        """Draw groups for all slots of a further iteration; those that get none are left out of the loss.

        Args:
            scored ([`ScoredBatch`]): The batch, with all groups dead.
            rows ([`SharedRows`]): With what is shared of the last one's candidates.
            pending ([`PendingGroups`], *optional*): These.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
            iteration (`int`): 1 for the first further one.
        """
        tally = Tally(groups=len(scored.groups))
        admitted = self.settle(pending, rows, [], tally)
        most, _ = self._buffer.allowed(len(scored.groups))
        plan, priorities = self._fill_slots(scored, np.arange(len(scored.groups)), most, collected_at, tally)
        self._book(scored.groups, plan, tally)
        plan.leave_empty(plan.unfilled)
        self._treat(scored, plan, iteration, tally)
        return Decision(tally, admitted, plan, priorities)

    def _admitted(self, stored: Sequence[Candidate], rows: SharedRows) -> Admitted:
        serials = [candidate.serial for candidate in stored]
        slots = [candidate.slot for candidate in stored]
        payloads = {candidate.serial: candidate.payload() for candidate in stored}
        mine = {serial: payload for serial, payload in payloads.items() if payload is not None}
        return Admitted(rows.arrivals(serials, slots, self._processes), mine)

    def select(self, new_groups: Groups, tally: Tally) -> tuple[Ints, int]:
        """The slots that replay may fill, the most replaceable first, and how many of them the limits allow."""
        groups = len(new_groups)
        tally.groups = groups
        slots = self._select(new_groups)
        most, limit = self._buffer.allowed(groups)
        if len(slots) > most:
            tally.note(1, f"{limit} allows {most} of {groups} groups")
        elif not len(slots):
            asked_for_dead = self._settings.label("selector") == "zero_std"
            reason = ALL_LIVE if asked_for_dead and not new_groups.dead.any() else NONE_CHOSEN
            kept = self._settings.config.replay_kl == "all_wrong" and self._success.without(new_groups).any()
            tally.note(1, (KEPT_LOWEST if self._success.least is None else KEPT_WRONG) if kept else reason)
        return slots, most

    def _select(self, new_groups: Groups) -> Ints:
        """The selector's slots, without groups whose KL term is to count (`replay_kl="all_wrong"`)."""
        slots = self._hooks.select(new_groups, self._context())
        if self._settings.config.replay_kl != "all_wrong":
            return slots
        return slots[~self._success.without(new_groups)[slots]]

    def _fill_slots(
        self, scored: ScoredBatch, slots: Ints, most: int, collected_at: int | None, tally: Tally
    ) -> tuple[Plan, dict[int, float]]:
        """Eligible entries in the slots, never one twice, and which of the slots' rows theirs take.

        Args:
            scored ([`ScoredBatch`]): The batch.
            slots (`(n,)`): What may be filled, in the selector's order.
            most (`int`): So many of them at most.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
            tally ([`Tally`]): Counts what keeps replay from more.

        Returns:
            The plan, and each placed entry's chance to be drawn first.

        Raises:
            SeamError: The model was updated, but the loss was not seen to go through the seam; or advantages are to be
                computed that TRL's rules do not explain.
        """
        plan = Plan.of(scored.groups)
        wanted = min(len(slots), most)
        if not wanted or not self._buffer.capacity:
            return plan, {}
        if not self._handshake.has_run(self._buffer.clock.update, collected_at) and len(self._buffer):
            tally.note(1, TOO_EARLY)
            return plan, {}
        drawn = self._buffer.sample(scored.groups.take(slots), tally, scored.keys, wanted=wanted)
        if drawn is None:
            return plan, {}
        some = drawn.some
        filled, mixed = self.mixing.mix(
            scored, slots[np.flatnonzero(some)], drawn.table, drawn.rows[some], most, tally
        )
        mixed.plan.entry = np.where(mixed.plan.stored, mixed.of_entries(drawn.eligible[mixed.used]), mixed.plan.entry)
        plan.put(filled, mixed.plan)
        entries = [entry for entry, _ in plan.drawn()]
        chances = drawn.chances[np.searchsorted(drawn.eligible, entries)]
        return plan, dict(zip(entries, chances.tolist(), strict=True))

    def _book(self, new_groups: Groups, plan: Plan, tally: Tally) -> None:
        """Count what is replayed, in the table too."""
        self._buffer.count_uses(np.array([entry for entry, _ in plan.drawn()], np.int64), tally)
        tally.replaced = int(plan.stored.any(axis=1).sum())
        tally.rows = int(plan.stored.sum())
        tally.dead_after = int((new_groups.dead & plan.unfilled).sum())

    def _treat(self, scored: ScoredBatch, plan: Plan, iteration: int, tally: Tally) -> None:
        """Let plugins and settings edit the plan, and count what it trains on."""
        groups = scored.groups
        table = self._buffer.table
        nothing = _teaches_nothing(plan, groups)
        if self._hooks.edits_plans:
            context = replace(self._context(), iteration=iteration)
            before, advantages = nothing, plan.advantages.copy()
            self._hooks.plan(plan, groups, table, context, scored.formula.of_tokens)
            zeroed = ((plan.advantages == 0) & (advantages != 0)).any(axis=1)
            nothing = _teaches_nothing(plan, groups, zeroed)
            tally.note(int((nothing & ~before).sum()), self._taken_away)
        items = np.where(plan.masked, 0, plan.column(table.row_items, groups.items))
        tally.items = float(groups.items.sum())
        tally.items_delta = float(items.sum()) - tally.items
        whole = plan.masked.all(axis=1)
        tally.dead_after = int(nothing.sum())
        tally.excluded = int(whole.sum())
        tally.masked = int(plan.masked[~whole].sum())
        tally.muted = int((plan.masked | plan.silent)[~_is_left(plan, groups)].sum())

    @property
    def _taken_away(self) -> str:
        editors = [plugin.name for plugin in self._settings.plugins if "trl_replay_plan" in plugin.hooks]
        who = f"{'plugins' if len(editors) > 1 else 'plugin'} {', '.join(map(repr, editors))}"
        return (
            f"a group trains nothing: its rows are masked, silent, or of advantage 0 by trl_replay_plan of the {who}"
        )

    def _candidate_slots(self, scored: ScoredBatch, plan: Plan, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        if not self._buffer.capacity:
            return []
        live = ~scored.groups.dead
        seen = live if scored.logps_known else live & ~plan.stored.any(axis=1)
        tally.lost = int(live.sum() - seen.sum())
        solved = np.isin(scored.groups.prompt, self._buffer.solved_prompts(scored.generations))
        tally.refuse(int((seen & solved).sum()), SOLVED)
        return np.flatnonzero(seen & ~solved).tolist()


def _is_left(plan: Plan, groups: Groups) -> Bools:
    """Slots that stay as they are, dead or empty, `(n,)`."""
    return np.asarray((groups.dead & plan.unfilled) | (plan.entry == EMPTY).all(axis=1))


def _teaches_nothing(plan: Plan, groups: Groups, zeroed: Bools | bool = False) -> Bools:
    """Slots without a row that trains, `(n,)`; where advantages were `zeroed`, those of 0 train nothing."""
    mute = plan.masked | plan.silent
    of_zero = zeroed & (mute | (plan.advantages == 0)).all(axis=1)
    return np.asarray(_is_left(plan, groups) | mute.all(axis=1) | of_zero)
