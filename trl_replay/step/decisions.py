"""Measure, settle, select and sample: all that is decided for a batch, from columns alone, without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..buffer.candidates import Candidate, PendingGroups, StepCarry
from ..components import Components
from ..config import ReplayConfig
from ..counters import NO_ROOM, Tally
from ..distributed.row_layout import RowLayout
from ..errors import SeamError
from ..loss.off_policy_stats import STATS, effective_share
from ..loss.tap import Tap
from ..plan import Admitted, Plan, Sampled
from ..table import Table
from ..types import Bools, Context, Groups, Ints
from .dead_groups import copies, dead_slots

SOLVED = "its prompt is solved (replay_retire_passes)"
NO_PROMPTS: Ints = np.empty(0, np.int64)
NO_ENTRIES: Ints = np.empty(0, np.int64)


class Decisions:
    """The decisions of one session.

    Args:
        components ([`Components`]): Of the buffer only the table changes here; payload moves later.
        tap ([`Tap`]): Counts updates, and knows whether the seam has been seen to work.
        context (`Callable`): Gives what strategies may know at this moment.
        config ([`ReplayConfig`]): Limits, and how scores change.
    """

    def __init__(
        self,
        components: Components,
        tap: Tap,
        context: Callable[[], Context],
        config: ReplayConfig,
    ) -> None:
        self._buffer = components.buffer
        self._hooks = components.hooks
        self._rate_limiter = components.rate_limiter
        self._weigh = components.weigh
        self._processes = components.processes
        self._tap = tap
        self._context = context
        self._config = config

    def settle_last_batch(
        self,
        plan: Plan,
        rows: RowLayout,
        pending: PendingGroups | None,
        replayed: Mapping[int, int],
    ) -> None:
        """Settles what the last generation batch left: its candidates, and what the loss showed of replayed groups.

        Args:
            plan ([`Plan`]): With `fresh`, but at the end of training; gets `admitted`.
            rows ([`RowLayout`]): Of the batch at hand; its columns tell of the last one's candidates, too.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.
            replayed (`Mapping[int, int]`): Serial of the group in each of the last batch's slots that replay filled.
        """
        tally = plan.tally
        self.record_replay_stats(replayed, rows.columns, tally)
        solved = NO_PROMPTS if plan.fresh is None else self.solve(plan.fresh, tally)
        tally.refuse(self._buffer.withdraw(rows.overflowed()), NO_ROOM)
        self._buffer.retire(self._tap.update)  # not counted: these limits are the entries' ordinary end
        if pending is not None:
            plan.admitted = self._settle(pending, rows, solved, tally)

    def fill_batch(self, plan: Plan, rows: RowLayout, carry: StepCarry, keys: frozenset[str], known: bool) -> None:
        """Chooses what is replayed in the fresh batch, and which of its groups become candidates.

        Args:
            plan ([`Plan`]): With `fresh`; gets `sampled`, `copies` and `candidates`.
            rows ([`RowLayout`]): Of the fresh batch.
            carry ([`StepCarry`]): When candidates were last collected.
            keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
            known (`bool`): Whether the batch holds old log-probs.
        """
        fresh = plan.fresh
        assert fresh is not None
        slots = self.select(fresh, plan.tally)
        sampled = self.sample(slots, fresh, keys, carry.collected_at, plan.tally)
        if self._config.replay_dry_run:
            plan.tally.items_delta = 0.0
        else:
            plan.sampled = sampled
            plan.copies = self._copies(fresh, sampled, rows, plan.tally)
        plan.candidates = self._noteworthy(fresh, plan.sampled, known, plan.tally)

    def record_replay_stats(
        self,
        replayed: Mapping[int, int],
        columns: Mapping[str, NDArray[Any]],
        tally: Tally,
    ) -> None:
        """Takes note of what the loss showed of the last batch's replayed groups: drift, scores, the limits.

        Args:
            replayed (`Mapping[int, int]`): Serial of the group in each of the last batch's slots that replay filled.
            columns (`Mapping[str, NDArray]`): [`OffPolicyStats.columns`] over all rows that share the buffer.
            tally ([`Tally`]): Counts the entries that leave.
        """
        self._rate_limiter.measured(effective_share(columns))
        table = self._buffer.table
        size = self._context().num_generations
        limit = self._config.replay_max_log_ratio
        too_far = []
        for slot, serial in replayed.items():
            row = np.flatnonzero(table.serial == serial)
            rows = slice(slot * size, (slot + 1) * size)
            sums = {name: columns[name][rows].sum().item() for name in STATS}
            if not len(row) or not sums["seen"]:
                continue
            drift = sums["drift"] / sums["seen"]
            table.writable("drift")[row] = drift
            self._refresh(table, row, sums, drift)
            if limit is not None and drift > limit:
                too_far.append(serial)
        tally.retire(self._buffer.withdraw(too_far), "its mean |log ratio| passed replay_max_log_ratio")

    def _refresh(self, table: Table, row: Ints, sums: Mapping[str, float], drift: float) -> None:
        """Changes an entry's score after its replay, as `replay_refresh` says."""
        refresh = self._config.replay_refresh
        if refresh == "ratio":
            kept = np.exp(-drift)
            table.writable("score")[row] = table.first_score[row] * kept
        elif refresh == "advantage":
            table.writable("score")[row] = sums["remaining_signal"] / sums["seen"]

    def solve(self, fresh: Groups, tally: Tally) -> Ints:
        """Takes note of how the fresh groups went; returns the prompts that are solved, whose entries leave."""
        self._rate_limiter.observe(fresh)
        prompts = fresh.prompt[self._solved(fresh)]
        left = self._buffer.forget_prompts(prompts)
        tally.retire(left, "its prompt was solved (replay_retire_passes)")
        return prompts

    def _solved(self, fresh: Groups) -> Bools:
        needed = self._config.replay_retire_passes
        if needed is None:
            return np.zeros(len(fresh), bool)
        passes = (fresh.reward >= self._config.replay_pass_reward).sum(axis=1)
        return np.asarray(passes >= needed)

    def _settle(self, pending: PendingGroups, rows: RowLayout, solved: Ints, tally: Tally) -> Admitted:
        """The candidates have their log-probs now: scores them and offers them to the buffer."""
        usable, groups = pending.admissible(rows.columns, tally)
        if groups is None:
            return Admitted()
        due = np.flatnonzero(~np.isin(groups.prompt, solved))
        tally.refuse(len(usable) - len(due), SOLVED)
        usable = [usable[row] for row in due]
        logps = groups.behaviour_logps
        groups = groups.take(due, None if logps is None else logps[due])
        kept = self.offer(
            groups,
            [candidate.serial for candidate in usable],
            rows.sizes([candidate.slot for candidate in usable]),
            [candidate.keys for candidate in usable],
            tally,
        )
        stored = [candidate for candidate in usable if candidate.serial in kept]
        return self._admitted(stored, rows)

    def _admitted(self, stored: Sequence[Candidate], rows: RowLayout) -> Admitted:
        serials = [candidate.serial for candidate in stored]
        slots = [candidate.slot for candidate in stored]
        mine = {candidate.serial: candidate.group for candidate in stored if candidate.group is not None}
        return Admitted(rows.arrivals(serials, slots, self._processes), mine)

    def offer(
        self,
        groups: Groups,
        serials: Sequence[int],
        sizes: Sequence[int],
        keys: Sequence[frozenset[str]],
        tally: Tally,
    ) -> set[int]:
        """Scores groups and offers them to the buffer; returns the serials of those that stayed, whose payload is due.

        Args:
            groups ([`Groups`]): With their behaviour log-probs.
            serials (`Sequence[int]`): Their serial numbers.
            sizes (`Sequence[int]`): Bytes of payload of each.
            keys (`Sequence[frozenset[str]]`): Batch keys that each of them can restore.
            tally ([`Tally`]): Counts what is refused, stored and evicted.
        """
        context = self._context()
        scores = self._hooks.score(groups, context)
        nbytes = np.asarray(sizes, np.int64)
        finite = np.isfinite(scores)
        fitting = self._buffer.fits(nbytes)
        tally.refuse(int((~finite).sum()), "its score is not finite")
        tally.refuse(int((finite & ~fitting).sum()), "it alone is larger than replay_max_bytes")
        chosen = np.flatnonzero(finite & fitting)
        groups = groups.take(chosen)
        keysets = [self._buffer.keyset(keys[row]) for row in chosen.tolist()]
        columns: dict[str, NDArray[Any]] = {
            "serial": np.asarray(serials, np.int64)[chosen],
            "step": groups.step,
            "score": scores[chosen],
            "reward_mean": groups.reward_mean,
            "reward_std": groups.reward_std,
            "tokens": groups.trainable.sum(axis=1),
            "items": groups.counted.sum(axis=1),
            "prompt": groups.prompt,
            "nbytes": nbytes[chosen],
            "keys": np.array(keysets, np.int64),
        }
        stored, evicted = self._buffer.offer(columns, self._rank, context.rng)
        tally.evicted = evicted
        tally.stored = len(stored)
        self._rate_limiter.inserted(len(stored))
        return set(stored)

    def trim(self) -> int:
        """Evicts what a smaller capacity than the saved one has no room for; returns its number."""
        return self._buffer.trim(self._rank)

    def _rank(self, table: Table) -> NDArray[Any]:
        """Keep ranks, of scores as they are worth by now."""
        return self._hooks.rank(self._aged(table), self._context())

    def select(self, fresh: Groups, tally: Tally) -> list[int]:
        """The slots that replay may fill, most replaceable first, no more than the limits allow."""
        groups = len(fresh)
        tally.groups = groups
        tally.dead = int(fresh.dead.sum())
        slots: list[int] = self._hooks.select(fresh, self._context()).tolist()
        most, limit = self._rate_limiter.slots_allowed(groups, self._tap.update)
        if len(slots) > most:
            tally.reasons[f"{limit} allows {most} of {groups} groups"] += 1
        elif not slots:
            tally.reasons["no group of the batch was replaceable (the selector chose none)"] += 1
        return slots[:most]

    def sample(
        self,
        slots: list[int],
        fresh: Groups,
        keys: frozenset[str],
        collected_at: int | None,
        tally: Tally,
    ) -> Sampled:
        """Eligible entries for the slots, never one twice.

        Args:
            slots (`list[int]`): What may be filled, in order.
            fresh ([`Groups`]): The fresh groups.
            keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
            collected_at (`int`, *optional*): Update at which candidates were last collected.
            tally ([`Tally`]): Counts, and why slots stay as they are.

        Raises:
            SeamError: The model was updated, but the loss was not seen to go through the seam.
        """
        table = self._buffer.table
        update = self._tap.update
        drawn, priorities = NO_ENTRIES, list[float]()
        if slots and self._seam_has_run(collected_at):
            drawn, priorities = self._draw(len(slots), keys, tally)
        filled = slots[: len(drawn)]
        ages: list[int] = (update - table.step[drawn]).tolist()
        self._rate_limiter.drawn(len(drawn))
        self._buffer.use(drawn, update)
        tally.replaced = len(drawn)
        tally.age = float(sum(ages))
        tally.score = float(table.score[drawn].sum())
        tally.uses = float(table.uses[drawn].sum())
        put_in = table.items[drawn].sum()
        taken_out = fresh.counted[filled].sum()
        tally.items_delta = float(put_in - taken_out)
        tally.dead_after = int(np.delete(fresh.dead, filled).sum())
        serials: list[int] = table.serial[drawn].tolist()
        return Sampled(filled, serials, ages, drawn.tolist(), priorities)

    def _seam_has_run(self, collected_at: int | None) -> bool:
        """Whether replayed rows would be corrected: nothing is drawn before the loss has been seen to do so."""
        if self._tap.verified:
            return True
        if collected_at is not None and self._tap.update > collected_at:
            raise SeamError(
                f"The model was updated, but {compat.LOSS} and {compat.LOGPS} were not seen to run: the loss of "
                "this trainer goes around the seam, so that replayed rows could not be corrected."
            )
        return False  # before the first loss nothing is stored either

    def _draw(self, count: int, keys: frozenset[str], tally: Tally) -> tuple[Ints, list[float]]:
        """Table rows for `count` slots, as many as are eligible, and their priorities."""
        buffer = self._buffer
        rows, held_back = buffer.eligible(self._tap.update, keys)
        drawn, priorities = rows[:0], list[float]()
        if len(rows):
            table = self._aged(buffer.table)
            if len(rows) < len(buffer):
                table = table.take(rows)
            chosen = self._hooks.sample(table, min(count, len(rows)), self._context())
            drawn = rows[chosen]
            priorities = self._priorities(table, chosen)
        if len(drawn) < count:
            tally.reasons[self._shortage(held_back)] += 1
        return drawn, priorities

    def _shortage(self, held_back: Mapping[str, int]) -> str:
        """Why fewer entries were drawn than there were slots."""
        if len(self._buffer):
            reason = "the buffer held fewer eligible groups than slots"
        elif self._rate_limiter.has_seen_entries:
            reason = "the buffer was empty"
        else:
            reason = "the buffer was empty: no live group has been stored yet"
        limits = sorted(held_back.keys() - {"replay_min_size"} if not len(self._buffer) else held_back)
        if not limits:
            return reason
        return f"{reason} (held back: {', '.join(limits)})"

    def _priorities(self, table: Table, chosen: Ints) -> list[float]:
        """Of each chosen entry, its chance of being drawn first relative to that of the least likely one."""
        if self._weigh is None:
            return [1.0] * len(chosen)
        weights = np.asarray(self._weigh(table, self._context()), np.float64)
        usable = weights[np.isfinite(weights) & (weights > 0)]
        least = usable.min() if len(usable) else 1.0
        relative = weights[chosen] / least  # entries without weight are drawn when no others are left
        relative[~np.isfinite(relative)] = 1.0
        priorities: list[float] = np.maximum(relative, 1.0).tolist()
        return priorities

    def _aged(self, table: Table) -> Table:
        """The table with its scores as they are worth by now."""
        half_life = self._config.replay_half_life
        if half_life is None:
            return table
        age = np.maximum(self._tap.update - table.step, 0)
        decay = np.exp2(-age / half_life)
        divisor = np.maximum(decay, np.finfo(np.float64).tiny)
        with np.errstate(over="ignore"):  # a score below 0 may end at -inf, which ranks lowest
            fallen = table.score / divisor
        positive = table.score > 0
        return table.with_scores(np.where(positive, table.score * decay, fallen))

    def _noteworthy(self, fresh: Groups, sampled: Sampled, known: bool, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        live = np.flatnonzero(~fresh.dead).tolist()
        if not known:
            live = [slot for slot in live if slot not in sampled.slots]
        trainable = [slot for slot in live if fresh.trainable[slot].any()]
        tally.refuse(len(live) - len(trainable), "it has no trainable token")
        solved = self._solved(fresh)
        unsolved = [slot for slot in trainable if not solved[slot]]
        tally.refuse(len(trainable) - len(unsolved), SOLVED)
        return unsolved

    def _copies(self, fresh: Groups, sampled: Sampled, rows: RowLayout, tally: Tally) -> list[tuple[int, int]]:
        """What `replay_unfilled` makes of the dead groups that nothing fills; returns the pairs (slot, live slot that
        is copied there)."""
        choice = self._config.replay_unfilled
        tokens = fresh.counted.sum(axis=1)
        if choice == "exclude":
            left = dead_slots(fresh, sampled.slots)
            tally.excluded = len(left)
            tally.excluded_items = float(tokens[left].sum())
        if choice != "intra_batch":
            return []
        pairs = copies(fresh, sampled, rows, self._context().rng)
        tally.dead_after -= len(pairs)
        for dead, live in pairs:
            tally.items_delta += float(tokens[live] - tokens[dead])
        return pairs
