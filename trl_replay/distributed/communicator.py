"""A session's communication with other processes: share, agree, admit and fetch, in this order for every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..batch.candidates import PendingGroups
from ..batch.compose import check, join, take_rows
from ..batch.group_view import TOLD_ITEMS, blank, describe, with_environments
from ..data.counters import COUNTERS, Tally
from ..data.tasks import task_of_group
from ..data.types import Batch, Floats, Group, Packed
from ..errors import SeamError
from ..protocols import Agreement, Columns
from ..serialization.groups import pack, unpack
from ..setup.settings import Components
from ..strategies.scopes import UnreadableError
from .agreement import Message, decision_message, reason_of_decisions, reason_of_failure
from .row_layout import MISSING, Decision, RowLayout

Made = TypeVar("Made")
Decided = TypeVar("Decided", bound=Decision)
STOPS = "Replay stops on all processes. "


@dataclass(frozen=True, slots=True)
class Agreed(Generic[Decided]):
    """A decision that all processes have made.

    Attributes:
        decision ([`Decision`]): This process's.
        total (`dict[str, float]`): Its counters, summed over all ranks.
    """

    decision: Decided
    total: dict[str, float]


class Communicator:
    """The communication of one session. Every process calls `share`, `agree` and `move` equally often, also after an
    error.

    Everything is decided from columns before `agree`, and payload moves after it. So an error on one process reaches
    all of them at `agree`, and none waits for payload that another will not send.

    Attributes:
        rank (`int`): This process.
        ranks (`int`): Number of processes.
        shares (`int`): How often columns were shared.

    Args:
        components ([`Components`]): Scope, buffer and fields.
        rank (`int`): This process.
    """

    def __init__(self, components: Components, rank: int) -> None:
        self._components = components
        self._buffer = components.buffer
        self._errors = components.errors
        self.rank = rank
        self.ranks = components.processes
        self.shares = 0

    def share(
        self, batch: Batch | None, count: int, pending: PendingGroups | None, changed: bool = False
    ) -> RowLayout:
        """Share row columns of the fresh batch and of the last batch's candidates among all processes.

        A process whose batch can't be described shares blank columns, so that the others need not wait for it, and
        keeps the error.

        Args:
            batch (`dict`, *optional*): As TRL returned it; None at the end of training.
            count (`int`): Rows of this process's batches.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.
            changed (`bool`): Whether another reward rule than before scores here.

        Returns:
            Where the rows lie.
        """
        local = blank(self.rank * count, count)
        local["changed"][:] = changed
        with self._errors.keeping():
            if pending is not None:
                local |= pending.describe(count)
            if batch is not None:
                local |= self._described(batch)
        return self._share(local)

    def share_round(self, batch: Batch) -> RowLayout:
        """Share row columns of a further round, with the same number of rows on each process.

        Args:
            batch (`dict`): As TRL returned it.

        Returns:
            Where the rows lie.
        """
        count = batch["prompt_ids"].size(0)
        local = blank(self.rank * count, count)
        with self._errors.keeping():
            local |= self._described(batch)
        return self._share(local)

    def _described(self, batch: Batch) -> Columns:
        """Return the columns of this process's rows.

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
                f"The trainer got inputs for {asked} rows, and its batch holds {count}: replay does not support a "
                "trainer that drops or adds rows. Return as many rows as there are inputs."
            )
        of_rows = with_environments(tasks.of_rows, tasks.environments(), batch, fields)
        return describe(batch, self.rank * count, of_rows, fields)

    def _share(self, local: Columns) -> RowLayout:
        """Share columns; return the layout of the rows of all processes, each with its group's task."""
        size = self._components.num_generations
        update = self._buffer.clock.update
        shared: Columns = self._components.scope.share({name: of for name, of in local.items() if name != TOLD_ITEMS})
        self.shares += 1
        prompt = task_of_group(shared["prompt"], shared["row"], size, update, self.shares)
        return RowLayout({**shared, "prompt": prompt}, local, size)

    def agree(self, rows: RowLayout, decide: Callable[[], Decided], due: Sequence[int] = ()) -> Agreed[Decided]:
        """Decide, and check that all processes did: counters are summed; an error on any, or different
        decisions, raise on all.

        Of the ranks that share a buffer only the first counts what they decide together; each counts its own bytes.

        Args:
            rows ([`RowLayout`]): Where rows lie.
            decide (`Callable`): What is decided here; without communication.
            due (`Sequence[int]`): Serials of groups that may be admitted. If not all go on, these are taken back,
                since their payload will not come.
        """
        message = decision_message()

        def decided() -> tuple[Decided, Floats]:
            decision = decide()
            return decision, self._packed(message, rows, decision)

        try:
            decision, vectors = self.tell(decided, message.pack())
            told = message.unpack(vectors)
            reason = reason_of_decisions(told["leader"], told["decided"], told["advantages"])
            if reason:
                raise SeamError(STOPS + reason)
        except Exception:
            self._buffer.withdraw(due)
            raise
        total = told["counters"].sum(axis=0)
        totals = dict(zip(COUNTERS, total.tolist(), strict=True))
        return Agreed(decision, totals)

    def _packed(self, message: Message, rows: RowLayout, decision: Decision) -> Floats:
        buffer = self._buffer
        tally = decision.tally
        tally.size = len(buffer)
        tally.tasks = buffer.table.tasks
        tally.bytes = buffer.nbytes
        counted = tally if rows.leads else Tally(bytes=tally.bytes)
        return message.pack(
            counters=counted.vector(),
            leader=rows.leader,
            decided=rows.fingerprint(buffer.table, decision),
            advantages=rows.sums_of_advantages(decision.plan),
        )

    def tell(self, make: Callable[[], tuple[Made, Floats]], blank: Floats) -> tuple[Made, Floats]:
        """Build a value, and share some numbers about it with the other processes.

        Args:
            make (`Callable`): Returns it and a vector of fixed length; must not communicate.
            blank (`(numbers,)`): What is told if that fails.

        Returns:
            It, and the numbers of all processes, `(ranks, numbers)`.

        Raises:
            SeamError: Something failed on another process, What failed here,
                now or before, is raised here.
        """
        vector = blank
        if self._errors.first is None:  # else all processes stop here
            with self._errors.keeping():
                made, vector = make()
        error = self._errors.take()
        words = "" if error is None else f"{type(error).__name__}: {error}"
        agreement: Agreement = self._components.scope.agree(vector, words)
        reason = reason_of_failure(agreement)
        if error is not None:
            error.add_note(STOPS + reason)
            raise error
        if reason:
            raise SeamError(STOPS + reason)
        return made, agreement.vectors

    def move(self, rows: RowLayout, decision: Decision) -> dict[int, Group]:
        """Move admitted payload to its owners and drawn payload to its slots; return what arrived here."""
        components = self._components
        buffer = self._buffer
        admitted = decision.admitted
        parts: dict[int, list[Packed]] = self._arrived(
            lambda: components.scope.admit(buffer.table, admitted.arrivals, admitted.mine)
        )
        try:
            buffer.receive({serial: self._joined(held) for serial, held in parts.items()})
        except Exception as caught:
            if components.processes == 1:  # several stop together, and until then must go on with the same table
                buffer.withdraw(sorted(parts.keys() - buffer.held()))
            self._errors.keep(caught)
        requests = rows.requests(decision.plan, buffer.table)
        sources = decision.plan.source.ravel()
        drawn = zip(requests, decision.plan.drawn(), strict=True)
        wanted = {request.serial: sources[rows].tolist() for request, (_, rows) in drawn}
        return self._arrived(
            lambda: components.scope.fetch(requests, lambda serial: self._load(serial, wanted[serial]))
        )

    def _arrived(self, exchange: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Return what arrives here; nothing where that can't be read, of which the next message tells."""
        try:
            return exchange()
        except UnreadableError as caught:
            self._errors.keep(caught)
            return {}

    def _joined(self, parts: Sequence[Packed]) -> Packed:
        """The group of which these are the parts."""
        return parts[0] if len(parts) == 1 else pack(join([unpack(part) for part in parts], self._components.fields))

    def _load(self, serial: int, rows: list[int]) -> Group:
        """Load only those rows of the entry that are replayed."""
        try:
            group = self._buffer.load(serial)
            if rows == list(range(len(group.completion_lengths))):
                return group
            return take_rows(group, rows, self._components.fields)
        except Exception as caught:
            self._errors.keep(caught)
            return MISSING
