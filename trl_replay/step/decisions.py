"""What is decided for a batch, from columns alone, without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..batch.candidates import Candidate, PendingGroups
from ..buffer import Newcomer
from ..buffer.replay_buffer import SOLVED
from ..data.counters import Tally
from ..data.plan import EMPTY, Plan
from ..data.types import Bools, Groups, Ints
from ..distributed.row_layout import Admitted, Decision, RowLayout
from ..loss.inserted import Handshake
from ..setup.settings import Components, Settings
from .fresh_batch import FreshBatch
from .mixing import Mixing

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

    def settle(
        self, pending: PendingGroups | None, rows: RowLayout, generations: Sequence[Groups], tally: Tally
    ) -> Admitted:
        """Settle the last generation batch's candidates.

        Args:
            pending ([`PendingGroups`], *optional*): These, if there are any.
            rows ([`RowLayout`]): Of the batch at hand; its columns tell of the last one's candidates, too.
            generations (`Sequence[Groups]`): The groups of every generation of the batch at hand.
            tally ([`Tally`]): Counts what happens.
        """
        tally.unread = self._settings.config.replay_warm_start is not None and not self._buffer.warmed
        solved = self._buffer.observe(generations, tally)
        usable, groups = ([], None) if pending is None else pending.admissible(rows.columns, tally)
        if groups is None:
            return Admitted()
        sizes = rows.sizes([candidate.slot for candidate in usable])
        newcomers = [Newcomer(one.serial, nbytes, one.keys) for one, nbytes in zip(usable, sizes, strict=True)]
        kept = self._buffer.extend(groups, newcomers, tally, solved)
        return self._admitted([candidate for candidate in usable if candidate.serial in kept], rows)

    def fill_batch(self, fresh: FreshBatch, pending: PendingGroups | None, collected_at: int | None) -> Decision:
        """Choose what is replayed in the fresh batch, and which of its groups become candidates.

        Args:
            fresh ([`FreshBatch`]): The batch.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
        """
        tally = Tally(refilled=fresh.refilled, surplus=fresh.surplus)
        admitted = self.settle(pending, fresh.rows, fresh.generations, tally)
        slots, most = self.select(fresh.groups, tally)
        plan, priorities = self._fill_slots(fresh, slots, most, collected_at, tally)
        self._book(fresh.groups, plan, tally)
        if self._settings.config.replay_dry_run:
            plan = Plan.of(fresh.groups)
            plan.masked[:] = False  # as the trainer has it
        else:
            self._treat(fresh, plan, 0, tally)
        return Decision(tally, admitted, plan, priorities, self._candidate_slots(fresh, plan, tally))

    def fill_iteration(
        self,
        fresh: FreshBatch,
        rows: RowLayout,
        pending: PendingGroups | None,
        collected_at: int | None,
        iteration: int,
    ) -> Decision:
        """Draw groups for all slots of a further iteration; those that get none are left out of the loss.

        Args:
            fresh ([`FreshBatch`]): The batch, with all groups dead.
            rows ([`RowLayout`]): With what is shared of the last one's candidates.
            pending ([`PendingGroups`], *optional*): These.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
            iteration (`int`): 1 for the first further one.
        """
        tally = Tally(groups=len(fresh.groups))
        admitted = self.settle(pending, rows, [], tally)
        most, _ = self._buffer.allowed(len(fresh.groups))
        plan, priorities = self._fill_slots(fresh, np.arange(len(fresh.groups)), most, collected_at, tally)
        self._book(fresh.groups, plan, tally)
        plan.leave_empty(plan.unfilled)
        self._treat(fresh, plan, iteration, tally)
        return Decision(tally, admitted, plan, priorities)

    def _admitted(self, stored: Sequence[Candidate], rows: RowLayout) -> Admitted:
        serials = [candidate.serial for candidate in stored]
        slots = [candidate.slot for candidate in stored]
        payloads = {candidate.serial: candidate.payload() for candidate in stored}
        mine = {serial: payload for serial, payload in payloads.items() if payload is not None}
        return Admitted(rows.arrivals(serials, slots, self._processes), mine)

    def select(self, fresh: Groups, tally: Tally) -> tuple[Ints, int]:
        """The slots that replay may fill, the most replaceable first, and how many of them the limits allow."""
        groups = len(fresh)
        tally.groups = groups
        slots = self._select(fresh)
        most, limit = self._buffer.allowed(groups)
        if len(slots) > most:
            tally.note(1, f"{limit} allows {most} of {groups} groups")
        elif not len(slots):
            asked_for_dead = self._settings.label("selector") == "zero_std"
            reason = ALL_LIVE if asked_for_dead and not fresh.dead.any() else NONE_CHOSEN
            kept = self._settings.config.replay_kl == "all_wrong" and self._success.without(fresh).any()
            tally.note(1, (KEPT_LOWEST if self._success.least is None else KEPT_WRONG) if kept else reason)
        return slots, most

    def _select(self, fresh: Groups) -> Ints:
        """The selector's slots, without groups whose KL term is to count (`replay_kl="all_wrong"`)."""
        slots = self._hooks.select(fresh, self._context())
        if self._settings.config.replay_kl != "all_wrong":
            return slots
        return slots[~self._success.without(fresh)[slots]]

    def _fill_slots(
        self, fresh: FreshBatch, slots: Ints, most: int, collected_at: int | None, tally: Tally
    ) -> tuple[Plan, dict[int, float]]:
        """Eligible entries in the slots, never one twice, and which of the slots' rows theirs take.

        Args:
            fresh ([`FreshBatch`]): The batch.
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
        plan = Plan.of(fresh.groups, fresh.rows.ranks_of_slots)
        wanted = min(len(slots), most)
        if not wanted or not self._buffer.capacity:
            return plan, {}
        if not self._handshake.has_run(self._buffer.clock.update, collected_at) and len(self._buffer):
            tally.note(1, TOO_EARLY)
            return plan, {}
        drawn = self._buffer.sample(fresh.groups.take(slots), tally, fresh.keys, wanted=wanted)
        if drawn is None:
            return plan, {}
        some = drawn.some
        filled, mixed = self.mixing.mix(fresh, slots[np.flatnonzero(some)], drawn.table, drawn.rows[some], most, tally)
        mixed.plan.entry = np.where(mixed.plan.stored, mixed.of_entries(drawn.eligible[mixed.used]), mixed.plan.entry)
        plan.put(filled, mixed.plan)
        entries = [entry for entry, _ in plan.drawn()]
        chances = drawn.chances[np.searchsorted(drawn.eligible, entries)]
        return plan, dict(zip(entries, chances.tolist(), strict=True))

    def _book(self, fresh: Groups, plan: Plan, tally: Tally) -> None:
        """Count what is replayed, in the table too."""
        self._buffer.count_uses(np.array([entry for entry, _ in plan.drawn()], np.int64), tally)
        tally.replaced = int(plan.stored.any(axis=1).sum())
        tally.rows = int(plan.stored.sum())
        tally.dead_after = int((fresh.dead & plan.unfilled).sum())

    def _treat(self, fresh: FreshBatch, plan: Plan, iteration: int, tally: Tally) -> None:
        """Let plugins and settings edit the plan, and count what it trains on."""
        groups = fresh.groups
        table = self._buffer.table
        nothing = _teaches_nothing(plan, groups)
        if self._hooks.edits_plans:
            context = replace(self._context(), iteration=iteration, rank_of_slot=fresh.rows.ranks_of_slots)
            before, advantages = nothing, plan.advantages.copy()
            self._hooks.plan(plan, groups, table, context, fresh.rule.of_tokens)
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

    def _candidate_slots(self, fresh: FreshBatch, plan: Plan, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        if not self._buffer.capacity:
            return []
        live = ~fresh.groups.dead
        seen = live if fresh.logps_known else live & ~plan.stored.any(axis=1)
        tally.lost = int(live.sum() - seen.sum())
        solved = self._buffer.solved(fresh.groups)
        tally.refuse(int((seen & solved).sum()), SOLVED)
        return np.flatnonzero(seen & ~solved).tolist()


def _is_left(plan: Plan, groups: Groups) -> Bools:
    """Slots that stay as they are, dead or empty, `(n,)`."""
    return np.asarray((groups.dead & plan.unfilled & ~plan.copied.any(axis=1)) | (plan.entry == EMPTY).all(axis=1))


def _teaches_nothing(plan: Plan, groups: Groups, zeroed: Bools | bool = False) -> Bools:
    """Slots without a row that trains, `(n,)`; where advantages were `zeroed`, those of 0 train nothing."""
    mute = plan.masked | plan.silent
    of_zero = zeroed & (mute | (plan.advantages == 0)).all(axis=1)
    return np.asarray(_is_left(plan, groups) | mute.all(axis=1) | of_zero)
