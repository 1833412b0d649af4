"""All that one session says to other processes: share, agree, admit and fetch, in this order for every batch."""

from __future__ import annotations

import numpy as np

from ..batch.compose import check, join, take_rows
from ..batch.group_view import blank, describe, with_environments
from ..buffer.candidates import PendingGroups
from ..components import Components
from ..counters import COUNTERS, Tally
from ..errors import SeamError
from ..loss.off_policy_stats import OffPolicyStats
from ..plan import Plan, Taken
from ..protocols import Agreement, Columns
from ..tasks import settled
from ..types import Batch, Floats, Group
from .agreement import (
    decision_message,
    packed_bits,
    reason_of_decisions,
    reason_of_failure,
    reason_of_modes,
    unpacked_bits,
)
from .row_layout import MISSING, RowLayout
from .whereabouts import Whereabouts


class Communicator:
    """The communication of one session. Every process calls `share`, `agree` and `move` alike, whatever failed on it.

    Everything is decided from columns before `agree`, and payload moves after it. So an error on one process reaches
    all of them at `agree`, and none waits for payload that another will not send.

    Attributes:
        replaced (`list[bool]`): Of all processes' rows, in their order, whether replay took the last batch's.
        rank (`int`): This process.
        ranks (`int`): Number of processes.

    Args:
        components ([`Components`]): Scope, buffer and fields.
        stats ([`OffPolicyStats`]): What the loss showed of the last batch's replayed rows.
        rank (`int`): This process.
    """

    def __init__(self, components: Components, stats: OffPolicyStats, rank: int) -> None:
        self._components = components
        self._stats = stats
        self._errors = components.errors
        self.rank = rank
        self.ranks = components.processes
        self.replaced: list[bool] = []
        self._shares = 0
        self._whereabouts = Whereabouts(rank, components.processes)

    def share(
        self, batch: Batch | None, count: int, pending: PendingGroups | None
    ) -> tuple[RowLayout, Exception | None]:
        """Row columns of the fresh batch, of the last one's candidates and of its replayed rows, from all processes.

        A process whose batch can't be described shares blank columns, so that the others need not wait for it.

        Args:
            batch (`dict`, *optional*): As TRL returned it; None at the end of training.
            count (`int`): Rows of this process's batches.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.

        Returns:
            Where the rows lie, and what failed on this process.
        """
        components = self._components
        error = self._errors.take()
        local = blank(self.rank * count, count) | self._stats.columns(count)
        for row, serial in enumerate(components.buffer.overflow[:count]):
            local["overflow"][row] = serial + 1
        try:
            if pending is not None:
                local |= pending.describe(count)
            if batch is not None:
                local |= self._described(batch)
        except Exception as caught:
            error = error or caught
        return self._share(local), error

    def share_round(self, batch: Batch) -> tuple[RowLayout, Exception | None]:
        """Row columns of a further round of a batch, from all processes: with the same number of rows on each.

        Args:
            batch (`dict`): As TRL returned it.

        Returns:
            Where the rows lie, and what failed on this process.
        """
        count = batch["prompt_ids"].size(0)
        local = blank(self.rank * count, count)
        error: Exception | None = None
        try:
            local |= self._described(batch)
        except Exception as caught:
            error = caught
        return self._share(local), error

    def _described(self, batch: Batch) -> Columns:
        """The columns of this process's rows.

        Raises:
            SeamError: The batch holds other rows than were to be generated for.
        """
        fields = self._components.fields
        tasks = self._components.tasks
        check(batch, fields)
        count = batch["prompt_ids"].size(0)
        asked = len(tasks.of_rows)
        if asked != count:
            raise SeamError(
                f"The trainer was to generate for {asked} rows, and its batch holds {count}: a trainer that drops or "
                "adds rows can't be replayed for."
            )
        of_rows = with_environments(tasks.of_rows, tasks.environments(), batch, fields)
        return describe(batch, self.rank * count, of_rows, fields)

    def _share(self, local: Columns) -> RowLayout:
        """Where the rows of all processes lie, each with its group's task."""
        size = self._components.num_generations
        update = self._components.clock.update
        with self._whereabouts.at("share", update):
            shared: Columns = self._components.scope.share(local)
        self._shares += 1
        prompt = settled(shared["prompt"], shared["row"], size, update, self._shares)
        return RowLayout({**shared, "prompt": prompt}, local, size)

    def agree(self, rows: RowLayout, plan: Plan) -> dict[str, float]:
        """Sums the counters over all ranks; an error on any rank is raised on all, and so are different decisions and
        modes.

        Of the ranks that share a buffer only the first counts what they decide together; each counts its own bytes.
        """
        buffer = self._components.buffer
        tally = plan.tally
        tally.size = len(buffer)
        tally.tasks = buffer.table.tasks
        tally.bytes = buffer.nbytes
        counted = tally if rows.leads else Tally(bytes=tally.bytes)
        message = decision_message(rows.count)
        vector = message.pack(
            counters=counted.vector(),
            leader=rows.leader,
            decided=rows.fingerprint(buffer.table, plan.admitted, plan.sampled, plan.outcome),
            filled=packed_bits(rows.filled(plan.sampled)),
        )
        try:
            told = message.unpack(self.tell(plan.mode, vector, plan.error))
            reason = reason_of_decisions(told["leader"], told["decided"])
            if reason:
                raise self._stopping(None, reason)
        except Exception:
            buffer.withdraw(plan.admitted.serials)  # their payload will not come
            raise
        self.replaced = unpacked_bits(told["filled"], rows.count)
        total = told["counters"].sum(axis=0)
        return dict(zip(COUNTERS, total.tolist(), strict=True))

    def tell(self, mode: int, vector: Floats, error: Exception | None) -> Floats:
        """Tells the other processes some numbers, and returns those of all of them, `(ranks, numbers)`.

        Args:
            mode (`int`): What replay does here: `RUNS`, `PAUSED` or `DETACHED`.
            vector (`(numbers,)`): As many on each.
            error (`Exception`, *optional*): What failed here.

        Raises:
            SeamError: Something failed on one of them, or replay does not do the same on all; this process's own
                error, if it has one.
        """
        with self._whereabouts.at("agree", self._components.clock.update):
            agreement: Agreement = self._components.scope.agree(np.append(mode, vector), _words(error))
        modes = agreement.vectors[:, 0]
        reason = reason_of_failure(agreement) or reason_of_modes(modes)
        if reason:
            raise self._stopping(error, reason)
        return agreement.vectors[:, 1:]

    def _stopping(self, error: Exception | None, reason: str) -> Exception:
        """What this process raises: its own error, or that others have one."""
        words = f"Replay stops on all processes. {reason}"
        if error is None:
            return SeamError(words)
        if self._components.processes > 1:
            error.add_note(words)
        return error

    def move(self, rows: RowLayout, plan: Plan) -> dict[int, Group]:
        """Moves admitted payload to where it lives, and drawn payload to its slots; returns what came here."""
        components = self._components
        buffer = components.buffer
        with self._whereabouts.at("admit", self._components.clock.update):
            parts = components.scope.admit(buffer.table, plan.admitted.arrivals, plan.admitted.mine)
        try:
            groups = {serial: join(held, components.fields) for serial, held in parts.items()}
            buffer.receive(groups)
        except Exception as caught:
            if components.processes == 1:  # several stop together, and until then must go on with the same table
                buffer.withdraw_missing(list(parts))
            self._errors.keep(caught)
        requests = rows.requests(plan.sampled, buffer.table.owner)
        wanted = {taken.serial: taken for taken in plan.sampled.taken}

        def load(serial: int) -> Group:
            return self._load(wanted[serial])

        with self._whereabouts.at("fetch", self._components.clock.update):
            fetched: dict[int, Group] = components.scope.fetch(requests, load)
        return fetched

    def _load(self, taken: Taken) -> Group:
        """A copy of the entry's rows that are replayed: no other travels."""
        components = self._components
        try:
            group = components.buffer.load(taken.serial)
            if taken.is_whole and len(taken.sources) == len(group.completion_lengths):
                return group
            return take_rows(group, taken.sources.tolist(), components.fields)
        except Exception as caught:
            self._errors.keep(caught)
            return MISSING


def _words(error: Exception | None) -> str:
    """What an error tells other processes."""
    return "" if error is None else f"{type(error).__name__}: {error}"
