"""Measure, settle, select and sample: all that is decided for a batch, from columns alone, without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..buffer.candidates import PendingGroups
from ..components import Components
from ..config import ReplayConfig
from ..counters import Tally
from ..distributed.row_layout import Admitted, RowLayout, Sampled
from ..errors import SeamError
from ..loss.dead_group_mask import copies, dead_slots
from ..loss.off_policy_stats import STATS, effective_share
from ..loss.tap import Tap
from ..table import Table
from ..types import Bools, Context, Floats, Groups, Ints

SOLVED = "its prompt is solved (replay_retire_passes)"


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
        self._tap = tap
        self._context = context
        self._config = config

    def record_replay_stats(
        self,
        drawn: Mapping[int, int],
        columns: Mapping[str, NDArray[Any]],
        tally: Tally,
    ) -> None:
        """Takes note of what the loss showed of the last batch's replayed groups: drift, scores, the limits.

        Args:
            drawn (`Mapping[int, int]`): Serial of the group in each of the last batch's slots that replay filled.
            columns (`Mapping[str, NDArray]`): [`OffPolicyStats.columns`] over all rows that share the buffer.
            tally ([`Tally`]): Counts the entries that leave.
        """
        config, table, size = (
            self._config,
            self._buffer.table,
            self._context().num_generations,
        )
        self._rate_limiter.measured(effective_share(columns))
        gone = []
        for slot, serial in drawn.items():
            row = np.flatnonzero(table.serial == serial)
            sums = {name: float(columns[name][slot * size : (slot + 1) * size].sum()) for name in STATS}
            if not len(row) or not sums["seen"]:
                continue
            drift = sums["drift"] / sums["seen"]
            table.drift[row] = drift
            if config.replay_refresh == "ratio":
                table.score[row] = table.first_score[row] * np.exp(-drift)
            elif config.replay_refresh == "advantage":
                table.score[row] = sums["remaining_signal"] / sums["seen"]
            if config.replay_max_log_ratio is not None and drift > config.replay_max_log_ratio:
                gone.append(serial)
        tally.retire(
            self._buffer.withdraw(gone),
            "its mean |log ratio| passed replay_max_log_ratio",
        )

    def solve(self, fresh: Groups, tally: Tally) -> Ints:
        """Takes note of how the fresh groups went; returns the prompts that are solved, whose entries leave."""
        self._rate_limiter.observe(fresh)
        prompts = fresh.prompt[self._solved(fresh)]
        tally.retire(
            self._buffer.forget_prompts(prompts),
            "its prompt was solved (replay_retire_passes)",
        )
        return prompts

    def _solved(self, fresh: Groups) -> Bools:
        needed = self._config.replay_retire_passes
        if needed is None:
            return np.zeros(len(fresh), bool)
        return np.asarray((fresh.reward >= self._config.replay_pass_reward).sum(axis=1) >= needed)

    def settle(
        self,
        pending: PendingGroups | None,
        rows: RowLayout,
        ranks: int,
        solved: Ints,
        tally: Tally,
    ) -> Admitted:
        """The last batch's candidates have their log-probs now: score them and offer them to the buffer."""
        self._buffer.retire(self._tap.update)  # not counted: these limits are the entries' ordinary end
        usable, groups = pending.admissible(rows.columns, tally) if pending else ([], None)
        if pending is None or groups is None:
            return Admitted()
        due = np.flatnonzero(~np.isin(groups.prompt, solved))
        tally.refuse(len(usable) - len(due), SOLVED)
        usable, groups = (
            [usable[row] for row in due],
            groups.take(due, _rows(groups.behaviour_logps, due)),
        )
        slots = [candidate.slot for candidate in usable]
        serials = [candidate.serial for candidate in usable]
        keys = [candidate.keys for candidate in usable]
        kept = self.offer(groups, serials, rows.sizes(slots), keys, tally)
        stored = [candidate for candidate in usable if candidate.serial in kept]
        mine = {candidate.serial: candidate.group for candidate in stored if candidate.group is not None}
        arrivals = rows.arrivals([c.serial for c in stored], [c.slot for c in stored], ranks)
        return Admitted(arrivals, mine)

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
        scores, nbytes = (
            self._hooks.score(groups, context),
            np.asarray(sizes, np.int64),
        )
        finite, fitting = np.isfinite(scores), self._buffer.fits(nbytes)
        tally.refuse(int((~finite).sum()), "its score is not finite")
        tally.refuse(
            int((finite & ~fitting).sum()),
            "it alone is larger than replay_max_bytes",
        )
        chosen = np.flatnonzero(finite & fitting)
        groups = groups.take(chosen)
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
            "keys": np.array(
                [self._buffer.keyset(keys[row]) for row in chosen.tolist()],
                np.int64,
            ),
        }
        stored, tally.evicted = self._buffer.offer(
            columns,
            lambda table: self._hooks.rank(self._aged(table), context),
            context.rng,
        )
        tally.stored = len(stored)
        self._rate_limiter.inserted(len(stored))
        return set(stored)

    def trim(self) -> int:
        """Evicts what a smaller capacity than the saved one has no room for; returns its number."""
        context = self._context()
        return self._buffer.trim(lambda table: self._hooks.rank(self._aged(table), context))

    def select(self, fresh: Groups, tally: Tally) -> list[int]:
        """The slots that replay may fill, most replaceable first, no more than the limits allow."""
        tally.groups, tally.dead = len(fresh), int(fresh.dead.sum())
        slots = self._hooks.select(fresh, self._context()).tolist()
        most, limit = self._rate_limiter.slots_allowed(len(fresh), self._tap.update)
        if len(slots) > most:
            tally.reasons[f"{limit} allows {most} of {len(fresh)} groups"] += 1
        elif not slots:
            tally.reasons["no group of the batch was replaceable (the selector chose none)"] += 1
        return list(slots[:most])

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
            collected_at (`int`, *optional*): Update at which candidates were last pending.
            tally ([`Tally`]): Counts, and why slots stay as they are.

        Raises:
            SeamError: The model was updated, but the loss was not seen to go through the seam.
        """
        table, update = self._buffer.table, self._tap.update
        drawn, priorities = self._draw(len(slots), keys, collected_at, tally) if slots else (np.empty(0, np.int64), [])
        filled = slots[: len(drawn)]
        ages = (update - table.step[drawn]).tolist()
        sampled = Sampled(
            filled,
            table.serial[drawn].tolist(),
            ages,
            drawn.tolist(),
            priorities,
        )
        self._rate_limiter.drawn(len(drawn))
        self._buffer.use(drawn, update)
        tally.replaced, tally.age = len(drawn), float(sum(sampled.ages))
        tally.score, tally.uses = (
            float(table.score[drawn].sum()),
            float(table.uses[drawn].sum()),
        )
        tally.items_delta = float(table.items[drawn].sum() - fresh.counted[filled].sum())
        tally.dead_after = int(np.delete(fresh.dead, filled).sum())
        return sampled

    def _draw(
        self,
        count: int,
        keys: frozenset[str],
        collected_at: int | None,
        tally: Tally,
    ) -> tuple[Ints, list[float]]:
        """Table rows for `count` slots, as many as are eligible, and their priorities."""
        buffer, update = self._buffer, self._tap.update
        if not self._tap.verified:
            if collected_at is not None and update > collected_at:
                raise SeamError(
                    f"The model was updated, but {compat.LOSS} and {compat.LOGPS} were not seen to run: the loss of "
                    "this trainer goes around the seam, so that replayed rows could not be corrected."
                )
            tally.reasons["the loss has not run yet"] += 1
            return np.empty(0, np.int64), []
        rows, held_back = buffer.eligible(update, keys)
        drawn, priorities = rows[:0], list[float]()
        if len(rows):
            aged = self._aged(buffer.table)
            table = aged if len(rows) == len(buffer) else aged.take(rows)
            chosen = self._hooks.sample(table, min(count, len(rows)), self._context())
            drawn, priorities = rows[chosen], self._priorities(table, chosen)
        if len(drawn) < count:
            reason = "the buffer held fewer eligible groups than slots" if len(buffer) else "the buffer was empty"
            held = ", ".join(sorted(held_back))
            tally.reasons[f"{reason} (held back: {held})" if held else reason] += 1
        return drawn, priorities

    def _priorities(self, table: Table, chosen: Ints) -> list[float]:
        """Of each chosen entry, its chance of being drawn first relative to that of the least likely one."""
        if self._weigh is None:
            return [1.0] * len(chosen)
        weights = np.asarray(self._weigh(table, self._context()), np.float64)
        usable = weights[np.isfinite(weights) & (weights > 0)]
        least = usable.min() if len(usable) else 1.0
        relative = weights[chosen] / least  # entries without weight are drawn when no others are left
        priorities: list[float] = np.where(np.isfinite(relative), np.maximum(relative, 1.0), 1.0).tolist()
        return priorities

    def _aged(self, table: Table) -> Table:
        """The table with its scores as they are worth by now."""
        half_life = self._config.replay_half_life
        if half_life is None:
            return table
        age = np.maximum(self._tap.update - table.step, 0)
        decay = np.exp2(-age / half_life)
        with np.errstate(over="ignore"):  # a score below 0 may end at -inf, which ranks lowest
            fallen = table.score / np.maximum(decay, np.finfo(np.float64).tiny)
        return table.with_scores(np.where(table.score > 0, table.score * decay, fallen))

    def noteworthy(self, fresh: Groups, sampled: Sampled, known: bool, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        live = [slot for slot in np.flatnonzero(~fresh.dead).tolist() if known or slot not in sampled.slots]
        trainable = [slot for slot in live if fresh.trainable[slot].any()]
        tally.refuse(len(live) - len(trainable), "it has no trainable token")
        solved = self._solved(fresh)
        unsolved = [slot for slot in trainable if not solved[slot]]
        tally.refuse(len(trainable) - len(unsolved), SOLVED)
        return unsolved

    def leave(self, fresh: Groups, sampled: Sampled, rows: RowLayout, tally: Tally) -> list[tuple[int, int]]:
        """What `replay_unfilled` makes of the dead groups that nothing fills; returns the pairs (slot, live slot that
        is copied there)."""
        choice = self._config.replay_unfilled
        if choice == "intra_batch":
            pairs = copies(fresh, sampled, rows, self._context().rng)
            tally.dead_after -= len(pairs)
            tokens = fresh.counted.sum(axis=1)
            tally.items_delta += float(sum(tokens[live] - tokens[dead] for dead, live in pairs))
            return pairs
        if choice == "exclude":
            left = dead_slots(fresh, sampled.slots)
            tally.excluded, tally.excluded_items = (
                len(left),
                float(fresh.counted[left].sum()),
            )
        return []


def _rows(values: Floats | None, rows: Ints) -> Floats | None:
    return None if values is None else values[rows]
