"""All that one session says to other processes: share, agree, admit and fetch, in this order for every batch."""

from __future__ import annotations

import numpy as np

from ..batch.compose import check, join
from ..batch.group_view import blank, describe
from ..buffer.candidates import PendingGroups
from ..components import Components
from ..counters import COUNTERS, Tally
from ..errors import SeamError
from ..loss.tap import Tap
from ..types import Batch, Group
from .row_layout import (
    MISSING,
    Admitted,
    RowLayout,
    Sampled,
    reason_to_stop,
    unpacked,
)


class Communicator:
    """The communication of one session. Every process calls `share`, `agree` and `move` alike, whatever failed on it.

    Everything is decided from columns before `agree`, and payload moves after it. So an error on one process reaches
    all of them at `agree`, and none waits for payload that another will not send.

    Attributes:
        replaced (`list[bool]`): Of all processes' rows, in their order, whether replay took the last batch's.

    Args:
        components ([`Components`]): Scope, buffer and fields.
        tap ([`Tap`]): Keeps the errors that no other process can have heard of.
        rank (`int`): This process.
    """

    def __init__(self, components: Components, tap: Tap, rank: int) -> None:
        self._components = components
        self._tap = tap
        self._rank = rank
        self.replaced: list[bool] = []

    def share(
        self, batch: Batch | None, count: int, pending: PendingGroups | None
    ) -> tuple[RowLayout, Exception | None]:
        """Row columns of the fresh batch, of the last one's candidates and of its replayed rows, from all processes.

        A process whose batch can't be described shares blank columns, so that the others need not wait for it.

        Args:
            batch (`dict`, *optional*): As TRL returned it; None at the end of training.
            count (`int`): Rows of this process's batches.
            pending ([`PendingGroups`], *optional*): The last batch's candidates.
        """
        components, error = self._components, self._tap.take_error()
        first = self._rank * count
        local = blank(first, count) | self._tap.stats.columns(count)
        for row, serial in enumerate(components.buffer.overflow[:count]):
            local["overflow"][row] = serial + 1
        try:
            if pending is not None:
                local |= pending.describe(count, components.fields.names)
            if batch is not None:
                check(batch, components.fields)
                local |= describe(
                    batch,
                    first,
                    components.num_generations,
                    components.fields.pad_token_id,
                )
        except Exception as caught:
            error = error or caught
        return RowLayout(components.scope.share(local), local, components.num_generations), error

    def agree(
        self,
        rows: RowLayout,
        tally: Tally,
        error: Exception | None,
        admitted: Admitted,
        sampled: Sampled,
    ) -> dict[str, float]:
        """Sums the counters over all ranks; an error on any rank is raised on all, and so are different decisions.

        Of the ranks that share a buffer only the first counts what they decide together; each counts its own bytes.
        """
        buffer = self._components.buffer
        tally.size, tally.bytes = len(buffer), buffer.nbytes
        counters = tally.vector() if rows.leads else Tally(bytes=tally.bytes).vector()
        vector = np.concatenate(
            [
                counters,
                rows.identity(buffer.table, admitted, sampled),
                rows.filled(sampled),
            ]
        )
        agreement = self._components.scope.agree(vector, f"{type(error).__name__}: {error}" if error else "")
        reason = reason_to_stop(agreement, len(counters))
        if reason:
            buffer.withdraw(admitted.serials)
            if error is None:
                raise SeamError(f"Replay stops on all processes. {reason}")
            if self._components.processes > 1:
                error.add_note(f"Replay stops on all processes. {reason}")
            raise error
        self.replaced = unpacked(agreement.vectors[:, len(counters) + 2 :], rows.count)
        return dict(
            zip(
                COUNTERS,
                agreement.vectors.sum(axis=0).tolist()[: len(counters)],
                strict=True,
            )
        )

    def move(self, rows: RowLayout, admitted: Admitted, sampled: Sampled) -> dict[int, Group]:
        """Moves admitted payload to where it lives, and drawn payload to its slots; returns what came here."""
        buffer, fields = self._components.buffer, self._components.fields
        parts = self._components.scope.admit(buffer.table, admitted.arrivals, admitted.mine)
        try:
            buffer.receive({serial: join(held, fields) for serial, held in parts.items()})
        except Exception as caught:
            if self._components.processes == 1:  # several stop together, and until then must go on with the same table
                buffer.withdraw_missing(list(parts))
            self.keep(caught)
        return self._components.scope.fetch(rows.requests(sampled, buffer.table.owner), self._load)

    def keep(self, error: Exception) -> None:
        """Raises an error that no other process can have heard of; if there are others, at the next `agree`."""
        if self._components.processes == 1:
            raise error
        self._tap.error = self._tap.error or error

    def _load(self, serial: int) -> Group:
        try:
            return self._components.buffer.load(serial)
        except Exception as caught:
            self.keep(caught)
            return MISSING
