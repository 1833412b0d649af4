"""Measure, settle, select and sample: all that is decided for a batch, from columns alone, without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.candidates import Candidate, PendingGroups
from ..batch.group_view import AdvantageRule
from ..data.counters import Tally
from ..data.plan import Plan
from ..data.table import Table
from ..data.types import FROM_POLICY, Bools, Floats, Groups, Ints
from ..distributed.decision import Admitted, Decision
from ..distributed.row_layout import RowLayout
from ..loss.handshake import Handshake
from ..setup.components import Components
from ..setup.settings import Settings
from .fresh_batch import FreshBatch
from .mixing import Mixing

UNTRAINED = "a group counted as dead though its rewards differ: no row with an advantage trains a token"
SOLVED = "its prompt is solved (replay_retire_passes)"
OF_NO_TASK = "a group counts as a task of its own: its prompts differ, and its environment has no task_id"
BY_THE_SUM = "a group was judged by the weighted sum: the function that replay_reward names did not score it"
ALL_LIVE = "no group was dead: nothing to replace"
NONE_CHOSEN = "no group of the batch was replaceable (the selector chose none)"
KEPT_WRONG = "all-wrong groups stay: replay_kl='all_wrong' trains their KL term, and no other group was replaceable"
KEPT_LOWEST = (
    "dead groups at the lowest reward seen stay: replay_kl='all_wrong' trains their KL term, and no other group was "
    "replaceable"
)
TOO_EARLY = "nothing is replayed before the first loss: it shows whether replayed rows are corrected"
NO_PROMPTS: Ints = np.empty(0, np.int64)


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
        self._rate_limiter = components.rate_limiter
        self._success = components.success
        self._weigh = components.weigh
        self._processes = components.processes
        self._mixes_rows = components.mixes_rows
        self._draws_same_prompt = components.draws_same_prompt
        self._masks_rows = not components.beside_the_tap  # inside the log-prob method, which such a loss goes around
        self.mixing = Mixing(components, settings)
        self._clock = components.clock
        self._handshake = handshake
        self._context = components.context
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
        solved = self.solve(generations, tally)
        self._buffer.retire(self._clock.update)  # not counted: these limits are the entries' ordinary end
        if pending is None:
            return Admitted()
        return self._settle(pending, rows, solved, tally)

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
        plan, priorities = self._place(fresh, slots, most, collected_at, tally)
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
        most, _ = self._rate_limiter.slots_allowed(len(fresh.groups), self._clock.update)
        plan, priorities = self._place(fresh, np.arange(len(fresh.groups)), most, collected_at, tally)
        self._book(fresh.groups, plan, tally)
        plan.leave_empty(plan.unfilled)
        self._treat(fresh, plan, iteration, tally)
        return Decision(tally, admitted, plan, priorities)

    def solve(self, generated: Sequence[Groups], tally: Tally) -> Ints:
        """Take note of how all generated groups went; return the prompts that are solved, whose entries leave."""
        prompts = NO_PROMPTS
        for fresh in generated:
            passed = self._success.passed(fresh)
            self._rate_limiter.observe(fresh, passed, known=self._success.least is not None)
            tally.at_lowest += int(self._success.at_lowest(fresh).sum())
            tally.at_highest += int(self._success.at_highest(fresh).sum())
            tally.generated += len(fresh)
            tally.dead += int(fresh.dead.sum())
            unscored = fresh.unscored
            tally.failed += int(fresh.failed.sum())
            tally.all_wrong += int((~passed.any(axis=1) & ~unscored.all(axis=1)).sum())
            tally.all_right += int((passed.any(axis=1) & (passed | unscored).all(axis=1)).sum())
            untrained = _untrained(fresh)
            tally.untrained += untrained
            tally.note(untrained, UNTRAINED)
            by_the_sum = unscored.all(axis=1) & ~np.isnan(fresh.total).all(axis=1)
            tally.note(int(by_the_sum.sum()), BY_THE_SUM)
            alone = int((fresh.prompt < 0).sum())
            if alone:
                tally.reasons[OF_NO_TASK] += alone
            prompts = np.append(prompts, fresh.prompt[self._solved(passed)])
        left = self._buffer.forget_prompts(prompts)
        tally.retire(left, "its prompt was solved (replay_retire_passes)")
        return prompts

    def _solved(self, passed: Bools) -> Bools:
        """The groups of which enough rows, `(n, G)`, pass."""
        needed = self._settings.config.replay_retire_passes
        if needed is None:
            return np.zeros(len(passed), bool)
        return np.asarray(passed.sum(axis=1) >= needed)

    def _settle(self, pending: PendingGroups, rows: RowLayout, solved: Ints, tally: Tally) -> Admitted:
        """Score candidates, whose log-probs are known now, and offer them to the buffer."""
        usable, groups = pending.admissible(rows.columns, tally)
        if groups is None:
            return Admitted()
        kept = self.offer(
            groups,
            [candidate.serial for candidate in usable],
            rows.sizes([candidate.slot for candidate in usable]),
            [candidate.keys for candidate in usable],
            tally,
            solved=solved,
        )
        stored = [candidate for candidate in usable if candidate.serial in kept]
        return self._admitted(stored, rows)

    def _without_failed(self, groups: Groups) -> Groups:
        """The groups as they are stored: rows that failed are masked, where some row of their group has a reward."""
        if not self._masks_rows:
            return groups
        failed = groups.failed
        return replace(groups, masked=groups.masked | (failed & ~failed.all(axis=1, keepdims=True)))

    def _admitted(self, stored: Sequence[Candidate], rows: RowLayout) -> Admitted:
        serials = [candidate.serial for candidate in stored]
        slots = [candidate.slot for candidate in stored]
        payloads = {candidate.serial: candidate.payload() for candidate in stored}
        mine = {serial: payload for serial, payload in payloads.items() if payload is not None}
        return Admitted(rows.arrivals(serials, slots, self._processes), mine)

    def offer(
        self,
        groups: Groups,
        serials: Sequence[int],
        sizes: Sequence[int],
        keys: Sequence[frozenset[str]],
        tally: Tally,
        rewards: Floats | None = None,
        solved: Ints = NO_PROMPTS,
    ) -> set[int]:
        """Score groups and offer them to the buffer; return the serials of those that stayed, whose payload is due.

        Args:
            groups ([`Groups`]): With their behavior log-probs.
            serials (`Sequence[int]`): Their serial numbers.
            sizes (`Sequence[int]`): Bytes of payload of each.
            keys (`Sequence[frozenset[str]]`): Batch keys that each of them can restore.
            tally ([`Tally`]): Counts what is refused, stored and evicted.
            rewards (`(n, G, functions)`, *optional*): Raw rewards of the trainer's functions, where `groups` has
                others; NaN in groups whose file does not name them.
            solved (`(n,)`, *optional*): Prompts whose groups are refused.
        """
        groups = self._without_failed(groups)
        due = self._due(groups, solved, tally)
        if not len(due):
            return set()
        groups = groups.take(due)
        context = self._context()
        scores = self._hooks.score(groups, context)
        nbytes = np.asarray(sizes, np.int64)[due]
        finite = np.isfinite(scores)
        fitting = self._buffer.fits(nbytes)
        chosen = np.flatnonzero(finite & fitting)
        if len(chosen) < len(groups):
            unwanted = np.isnan(scores)
            tally.refuse(int(unwanted.sum()), f"the scorer {self._settings.label('scorer')} stores none like it (NaN)")
            tally.refuse(int((~finite & ~unwanted).sum()), "its score is infinite")
            tally.refuse(int((finite & ~fitting).sum()), "it alone is larger than replay_max_bytes")
            groups = groups.take(chosen)
            nbytes, scores, due = nbytes[chosen], scores[chosen], due[chosen]
        keysets = [self._buffer.keyset(keys[row]) for row in due.tolist()]
        columns: dict[str, NDArray[Any]] = {
            "serial": np.asarray(serials, np.int64)[due],
            "update": groups.update,
            "score": scores,
            "reward_mean": groups.reward_mean,
            "reward_std": groups.reward_std,
            "tokens": groups.trainable.sum(axis=1),
            "items": groups.counted.sum(axis=1),
            "prompt": groups.prompt,
            "nbytes": nbytes,
            "keys": np.array(keysets, np.int64),
        }
        columns |= _row_columns(groups, groups.rewards if rewards is None else rewards[due])
        stored, evicted = self._buffer.offer(
            columns,
            self._rank,
            context.rng,
            lambda rows: self._hooks.admitted(self._buffer.table, rows, groups, context),
        )
        tally.evicted = evicted
        tally.stored = len(stored)
        self._rate_limiter.inserted += len(stored)
        return set(stored)

    def _due(self, groups: Groups, solved: Ints, tally: Tally) -> Ints:
        """The groups that may be scored; the others are counted by the first reason."""
        finite = np.isfinite(np.asarray(groups.behavior_logps)).all(axis=1)
        known = groups.origin != FROM_POLICY  # whose log-probs are computed only if they stay
        refused = {
            "it has no trainable token": np.asarray(~groups.trains.any(axis=1)),
            "a trainable token's log-prob is not finite": known & ~finite,
            SOLVED: np.isin(groups.prompt, solved),
        }
        left = np.ones(len(groups), bool)
        for reason, rows in refused.items():
            tally.refuse(int((left & rows).sum()), reason)
            left &= ~rows
        return np.flatnonzero(left)

    def trim(self) -> int:
        """Evict what a smaller capacity than the saved one has no room for; return its number."""
        return self._buffer.trim(self._rank)

    def _rank(self, table: Table) -> NDArray[Any]:
        """The evictor's keep rank of each entry."""
        return self._hooks.rank(table, self._context())

    def select(self, fresh: Groups, tally: Tally) -> tuple[Ints, int]:
        """The slots that replay may fill, the most replaceable first, and how many of them the limits allow."""
        groups = len(fresh)
        tally.groups = groups
        slots = self._select(fresh)
        most, limit = self._rate_limiter.slots_allowed(groups, self._clock.update)
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

    def _place(
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
        plan = Plan.of(fresh.groups, fresh.rows.homes)
        wanted = min(len(slots), most)
        if not wanted or not self._buffer.capacity:
            return plan, {}
        if not self._handshake.has_run(self._clock.update, collected_at):
            tally.note(1, TOO_EARLY if len(self._buffer) else self.shortage([]))
            return plan, {}
        eligible, reasons = self._eligible(fresh)
        if not len(eligible):
            tally.note(1, self.shortage(reasons))
            return plan, {}
        table = self._buffer.table.take(eligible) if len(eligible) < len(self._buffer) else self._buffer.table
        drawn = self._hooks.sample(table, len(slots), self._context(fresh.groups.take(slots)))
        if len(drawn) < wanted:
            tally.note(1, self.shortage(reasons))
        some = (drawn >= 0).any(axis=1)
        left = max(min(len(drawn), wanted) - int(some.sum()), 0)
        self._note_empty(fresh.groups.prompt[slots[np.flatnonzero(~some)[:left]]], table, tally)
        if not some.any():
            return plan, {}
        filled, mixed = self.mixing.mix(fresh, slots[np.flatnonzero(some)], table, drawn[some], most, tally)
        mixed.plan.entry = np.where(mixed.plan.stored, mixed.of_entries(eligible[mixed.used]), mixed.plan.entry)
        plan.put(filled, mixed.plan)
        return plan, self._priorities(eligible, table, plan)

    def _eligible(self, fresh: FreshBatch) -> tuple[Ints, list[str]]:
        """Rows of the table that may be replayed now, and what holds others back."""
        held = self._hooks.eligible(self._buffer.table, self._context()) | self._unfit(fresh.rule)
        return self._buffer.eligible(self._clock.update, fresh.keys, held)

    def _book(self, fresh: Groups, plan: Plan, tally: Tally) -> None:
        """Count what is replayed, in the table too."""
        self._use(np.array([entry for entry, _ in plan.drawn()], np.int64), tally)
        tally.replaced = int(plan.stored.any(axis=1).sum())
        tally.rows = int(plan.stored.sum())
        tally.dead_after = int((fresh.dead & plan.unfilled).sum())

    def _use(self, entries: Ints, tally: Tally) -> None:
        """Count that these rows of the table are replayed."""
        table = self._buffer.table
        self._rate_limiter.drawn += len(entries)
        self._buffer.use(entries)
        tally.entries = len(entries)
        tally.age = float((self._clock.update - table.update[entries]).sum())
        tally.score = float(table.score[entries].sum())
        tally.uses = float(table.uses[entries].sum())

    def _treat(self, fresh: FreshBatch, plan: Plan, iteration: int, tally: Tally) -> None:
        """Let plugins and settings edit the plan, and count what it trains on."""
        groups = fresh.groups
        table = self._buffer.table
        context = replace(self._context(), iteration=iteration, home=fresh.rows.homes)
        self._hooks.plan(plan, groups, table, context, fresh.rule.of_tokens, beside_the_tap=not self._masks_rows)
        items = np.where(plan.masked, 0, plan.column(table.row_items, groups.items))
        tally.items_delta = float(items.sum() - groups.items.sum())
        whole = plan.masked.all(axis=1)
        nothing = (groups.dead & plan.unfilled & ~plan.copied.any(axis=1)) | (plan.masked | plan.silent).all(axis=1)
        tally.dead_after = int(nothing.sum())
        tally.excluded = int(whole.sum())
        tally.masked = int(plan.masked[~whole].sum())

    def _note_empty(self, prompts: Ints, table: Table, tally: Tally) -> None:
        """Count the slots, of these prompts, for which the sampler drew nothing."""
        if not self._draws_same_prompt:
            tally.note(len(prompts), f"the sampler {self._settings.label('sampler')} drew nothing for a slot")
            return
        stored = int(np.isin(prompts, table.prompt).sum())
        tally.note(stored, "a slot's prompt has no further group: each is replayed once a batch")
        tally.note(len(prompts) - stored, "no group of a slot's prompt can be replayed")

    def _unfit(self, rule: AdvantageRule) -> dict[str, Bools]:
        """Entries that can't be mixed into other groups, by reason."""
        setting = self._settings.config.replay_advantages
        computes = setting in ("joint", "split") or (setting == "auto" and self._mixes_rows)
        if not computes or not rule.takes_functions_apart:
            return {}
        unnamed = ~np.isnan(self._buffer.table.row_other_reward).all(axis=1)
        return {"its file does not name its reward functions": unnamed}

    def shortage(self, held_back: Sequence[str]) -> str:
        """Describe why fewer entries were drawn than there were slots."""
        if len(self._buffer):
            reason = "the buffer held fewer eligible groups than slots"
        elif self._rate_limiter.inserted:
            reason = "the buffer was empty"
        else:
            reason = "the buffer was empty: no live group has been stored yet"
        if not len(self._buffer) or not held_back:
            return reason
        return f"{reason} (held back: {', '.join(sorted(held_back))})"

    def _priorities(self, eligible: Ints, table: Table, plan: Plan) -> dict[int, float]:
        """By entry of the plan, its chance of being drawn first, relative to the least likely eligible entry's.

        Args:
            eligible (`(m,)`): Rows of the buffer's table.
            table ([`Table`]): These alone.
            plan ([`Plan`]): With the rows of the buffer's table that were placed.
        """
        if self._weigh is None:
            return {}
        chances = self.chances(table)
        entries = [entry for entry, _ in plan.drawn()]
        return dict(zip(entries, chances[np.searchsorted(eligible, entries)].tolist(), strict=True))

    def draw_one(self, slot: Groups | None, held: Mapping[str, Bools], tally: Tally) -> tuple[int, float] | None:
        """Draw and count an entry by itself, outside of any batch.

        Args:
            slot ([`Groups`], *optional*): The group whose place it takes.
            held (`Mapping[str, Bools]`): Entries that can't be replayed, by reason, beside those that plugins name.
            tally ([`Tally`]): Counts it, or what keeps it from being replayed.

        Returns:
            Its row of the table, and its chance to be drawn relative to the least likely eligible entry's; None where
            nothing can be replayed.
        """
        buffer, update, context = self._buffer, self._clock.update, self._context(slot)
        buffer.retire(update)
        held = self._hooks.eligible(buffer.table, context) | dict(held)
        eligible, reasons = buffer.eligible(update, frozenset(), held)
        if not len(eligible):
            tally.note(1, self.shortage(reasons))
            return None
        table = buffer.table.take(eligible)
        drawn = self._hooks.sample(table, 1, context).ravel()
        drawn = drawn[drawn >= 0]
        if not len(drawn):
            tally.note(1, "the sampler drew nothing for a group")
            return None
        chance = float(self.chances(table)[drawn[0]])
        self._use(eligible[drawn[:1]], tally)
        tally.replaced, tally.rows = 1, context.num_generations
        return int(eligible[drawn[0]]), chance

    @property
    def draws_for_any(self) -> bool:
        """Tell whether entries are drawn without a slot of their prompt."""
        return not self._draws_same_prompt

    def chances(self, table: Table) -> Floats:
        """Each entry's chance of being drawn first, relative to the least likely one's; 1 where no correction asks.

        Args:
            table ([`Table`]): The eligible entries alone.
        """
        if self._weigh is None:
            return np.ones(len(table))
        weights = np.asarray(self._weigh(table, self._context()), np.float64)
        least = weights.min(initial=np.inf)
        if not 0 < least < np.inf:
            usable = weights[np.isfinite(weights) & (weights > 0)]
            least = usable.min(initial=np.inf)
        relative = weights / least
        relative[~np.isfinite(relative)] = 1.0  # entries without weight are drawn when no others are left
        return np.asarray(np.maximum(relative, 1.0))

    def _candidate_slots(self, fresh: FreshBatch, plan: Plan, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        if not self._buffer.capacity:
            return []
        live = ~fresh.groups.dead
        seen = live if fresh.logps_known else live & ~plan.stored.any(axis=1)
        tally.lost = int(live.sum() - seen.sum())
        solved = self._solved(self._success.passed(fresh.groups))
        tally.refuse(int((seen & solved).sum()), SOLVED)
        return np.flatnonzero(seen & ~solved).tolist()


def _untrained(fresh: Groups) -> int:
    """The number of groups that are dead for want of trained tokens alone."""
    dead = fresh.dead & ~fresh.trains.all(axis=1)
    return int((dead & ~fresh.equal_rewards).sum()) if dead.any() else 0


def _row_columns(groups: Groups, rewards: Floats) -> dict[str, NDArray[Any]]:
    """Return the table's columns of each row.

    Args:
        groups ([`Groups`]): With their behavior log-probs.
        rewards (`(n, G, functions)`): Of the trainer's functions.
    """
    summed = groups.behavior_logps
    logps = np.full(groups.advantages.shape, np.nan) if summed is None else summed
    computed_later = np.isnan(logps) & (groups.origin != 0)[:, None]  # those of a file's groups, if these stay
    logps = np.where(computed_later, 0.0, logps)
    unnamed = np.asarray(np.isnan(rewards).all(axis=(1, 2)))[:, None] & ~groups.failed
    return {
        "row_rewards": rewards,
        "row_other_reward": np.where(unnamed, groups.total, np.nan),
        "row_advantage": groups.advantages,
        "row_logp": np.where(groups.trainable > 0, logps / np.maximum(groups.trainable, 1), np.nan),
        "row_length": groups.lengths,
        "row_items": groups.items,
        "row_masked": groups.masked,
    }
