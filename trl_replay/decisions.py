"""Settle, select and sample: everything that is decided for a batch, from columns alone and without communication.

On processes that share a buffer the columns and the private generator are the same, and so is every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import compat
from .behaviour import Tap
from .buffer import ReplayBuffer
from .candidates import Noted
from .config import ReplayConfig
from .errors import SeamError
from .exchange import Admission, Draw, Rows
from .hooks import SessionHooks
from .report import Tally
from .table import Table
from .types import Context, Groups, Ints


class Decisions:
    """The decisions of one session.

    Args:
        buffer ([`ReplayBuffer`]): Only its table changes here; payload moves later.
        hooks ([`SessionHooks`]): Plugins and strategies.
        tap ([`Tap`]): Counts updates, and knows whether the seam has been seen to work.
        context (`Callable`): Gives what strategies may know at this moment.
        config ([`ReplayConfig`]): `replay_max_fraction` and `replay_half_life`.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        hooks: SessionHooks,
        tap: Tap,
        context: Callable[[], Context],
        config: ReplayConfig,
    ) -> None:
        self._buffer = buffer
        self._hooks = hooks
        self._tap = tap
        self._context = context
        self._max_fraction = config.replay_max_fraction
        self._half_life = config.replay_half_life

    def settle(self, noted: Noted | None, rows: Rows, ranks: int, tally: Tally) -> Admission:
        """The last batch's candidates have their log-probs now: score them and offer them to the buffer."""
        self._buffer.retire(self._tap.update)
        usable, groups = noted.admissible(rows.columns, tally) if noted else ([], None)
        if noted is None or groups is None:
            return Admission()
        slots = [candidate.slot for candidate in usable]
        serials = [candidate.serial for candidate in usable]
        keys = [candidate.keys for candidate in usable]
        kept = self.offer(groups, serials, rows.sizes(slots), keys, tally)
        stored = [candidate for candidate in usable if candidate.serial in kept]
        mine = {candidate.serial: candidate.group for candidate in stored if candidate.group is not None}
        arrivals = rows.arrivals([c.serial for c in stored], [c.slot for c in stored], ranks)
        return Admission(arrivals, mine)

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
        scores, nbytes = self._hooks.score(groups, context), np.asarray(sizes, np.int64)
        finite, fitting = np.isfinite(scores), self._buffer.fits(nbytes)
        tally.refuse(int((~finite).sum()), "its score is not finite")
        tally.refuse(int((finite & ~fitting).sum()), "it alone is larger than replay_max_bytes")
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
            "keys": np.array([self._buffer.keyset(keys[row]) for row in chosen.tolist()], np.int64),
        }
        stored, tally.evicted = self._buffer.offer(
            columns, lambda table: self._hooks.rank(self._aged(table), context), context.rng
        )
        tally.stored = len(stored)
        return set(stored)

    def trim(self) -> int:
        """Evicts what a smaller capacity than the saved one has no room for; returns its number."""
        context = self._context()
        return self._buffer.trim(lambda table: self._hooks.rank(self._aged(table), context))

    def select(self, fresh: Groups, tally: Tally) -> list[int]:
        """The slots that replay may fill, most replaceable first, no more than `replay_max_fraction` allows."""
        tally.groups, tally.dead = len(fresh), int(fresh.dead.sum())
        slots = self._hooks.select(fresh, self._context()).tolist()
        most = int(self._max_fraction * len(fresh) + 1e-9)
        if len(slots) > most:
            tally.reasons[f"replay_max_fraction allows {most} of {len(fresh)} groups"] += 1
        elif not slots:
            tally.reasons["no group of the batch was replaceable (the selector chose none)"] += 1
        return list(slots[:most])

    def sample(
        self, slots: list[int], fresh: Groups, keys: frozenset[str], noted_at: int | None, tally: Tally
    ) -> Draw:
        """Eligible entries for the slots, never one twice.

        Args:
            slots (`list[int]`): What may be filled, in order.
            fresh ([`Groups`]): The fresh groups.
            keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
            noted_at (`int`, *optional*): Update at which candidates were last noted.
            tally ([`Tally`]): Counts, and why slots stay as they are.

        Raises:
            SeamError: The model was updated, but the loss was not seen to go through the seam.
        """
        table, update = self._buffer.table, self._tap.update
        drawn = self._draw(len(slots), keys, noted_at, tally) if slots else np.empty(0, np.int64)
        filled = slots[: len(drawn)]
        draw = Draw(filled, table.serial[drawn].tolist(), (update - table.step[drawn]).tolist(), drawn.tolist())
        self._buffer.use(drawn, update)
        tally.replaced, tally.age = len(drawn), float(sum(draw.ages))
        tally.score, tally.uses = float(table.score[drawn].sum()), float(table.uses[drawn].sum())
        tally.items_delta = float(table.items[drawn].sum() - fresh.counted[filled].sum())
        tally.dead_after = int(np.delete(fresh.dead, filled).sum())
        return draw

    def _draw(self, count: int, keys: frozenset[str], noted_at: int | None, tally: Tally) -> Ints:
        """Table rows for `count` slots, as many as are eligible."""
        buffer, update = self._buffer, self._tap.update
        if not self._tap.verified:
            if noted_at is not None and update > noted_at:
                raise SeamError(
                    f"The model was updated, but {compat.LOSS} and {compat.LOGPS} were not seen to run: the loss of "
                    "this trainer goes around the seam, so that replayed rows could not be corrected."
                )
            tally.reasons["the loss has not run yet"] += 1
            return np.empty(0, np.int64)
        rows, held_back = buffer.eligible(update, keys)
        drawn = rows[:0]
        if len(rows):
            aged = self._aged(buffer.table)
            table = aged if len(rows) == len(buffer) else aged.take(rows)
            drawn = rows[self._hooks.sample(table, min(count, len(rows)), self._context())]
        if len(drawn) < count:
            reason = "the buffer held fewer eligible groups than slots" if len(buffer) else "the buffer was empty"
            held = ", ".join(sorted(held_back))
            tally.reasons[f"{reason} (held back: {held})" if held else reason] += 1
        return drawn

    def _aged(self, table: Table) -> Table:
        """The table with its scores as they are worth by now."""
        if self._half_life is None:
            return table
        age = np.maximum(self._tap.update - table.step, 0)
        decay = np.exp2(-age / self._half_life)
        worth = np.where(
            table.score > 0, table.score * decay, table.score / np.maximum(decay, np.finfo(np.float64).tiny)
        )
        return table.with_scores(worth)

    def noteworthy(self, fresh: Groups, draw: Draw, known: bool, tally: Tally) -> list[int]:
        """Slots of the live groups whose log-probs will be known: stock's, or those of the loss that will see them."""
        live = [slot for slot in np.flatnonzero(~fresh.dead).tolist() if known or slot not in draw.slots]
        trainable = [slot for slot in live if fresh.trainable[slot].any()]
        tally.refuse(len(live) - len(trainable), "it has no trainable token")
        return trainable
