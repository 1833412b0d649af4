"""Scopes: which processes share a buffer. The four verbs are all the communication there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..protocols import Agreement, Arrival, Request
from ..table import Table
from ..types import Floats, Group

if TYPE_CHECKING:
    import torch

ERROR_BYTES = 512
"""Room for an error's text in `agree`; longer ones are cut."""


class ProcessScope:
    """Each process keeps its own groups. The only communication is `agree`.

    Attributes:
        received (`dict[str, int]`): Bytes that came from other processes so far, by verb.
    """

    def __init__(self, accelerator: Any, names: Sequence[str] = ()) -> None:
        self.accelerator = accelerator
        self.names = names
        self.received = dict.fromkeys(("share", "agree", "admit", "fetch"), 0)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """This process."""
        return int(self.accelerator.process_index)

    def share(self, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """This process's rows only."""
        return columns

    def agree(self, vector: Floats, error: str) -> Agreement:
        """Gathers every rank's vector and error text in one all-gather of bytes."""
        text = error.encode()[:ERROR_BYTES].ljust(ERROR_BYTES, b"\0")
        gathered = self._gather(
            "agree",
            np.frombuffer(vector.astype(np.float64).tobytes() + text, np.uint8),
        )
        vectors = np.ascontiguousarray(gathered[:, :-ERROR_BYTES]).view(np.float64)
        errors = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in gathered[:, -ERROR_BYTES:]]
        return Agreement(vectors, errors)

    def admit(
        self,
        table: Table,
        arrivals: Sequence[Arrival],
        mine: Mapping[int, Group],
    ) -> dict[int, list[Group]]:
        """This process's payload stays here."""
        table.owner[np.isin(table.serial, [arrival.serial for arrival in arrivals])] = self.rank
        return {arrival.serial: [mine[arrival.serial]] for arrival in arrivals}

    def fetch(self, requests: Sequence[Request], load: Callable[[int], Group]) -> dict[int, Group]:
        """Payload from this process's storage."""
        return {request.serial: load(request.serial) for request in requests}

    def _gather(self, verb: str, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`(ranks, bytes)`: every rank's bytes, of the same number on all."""
        if self.ranks == 1:
            return mine[None]
        import torch

        tensor = torch.from_numpy(mine.copy()).to(self.accelerator.device)
        gathered: NDArray[np.uint8] = self.accelerator.gather(tensor[None]).cpu().numpy()
        self.received[verb] += gathered.nbytes - mine.nbytes
        return gathered


class GatheredScope(ProcessScope):
    """One buffer, the same on every process: all decide alike, and every process holds every group.

    Only admitted payload travels, packed without padding: each process receives what was generated elsewhere.
    """

    def share(self, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One all-gather of this process's rows of all columns."""
        packed = np.concatenate([np.ascontiguousarray(column).view(np.uint8) for column in columns.values()])
        gathered = self._gather("share", packed).reshape(self.ranks, len(columns), -1)
        return {
            name: np.ascontiguousarray(gathered[:, number]).view(column.dtype).ravel()
            for number, (name, column) in enumerate(columns.items())
        }

    def admit(
        self,
        table: Table,
        arrivals: Sequence[Arrival],
        mine: Mapping[int, Group],
    ) -> dict[int, list[Group]]:
        """Every process sends its rows of what was admitted to every other."""
        table.owner[np.isin(table.serial, [arrival.serial for arrival in arrivals])] = self.rank
        return self._move(arrivals, [range(self.ranks)] * len(arrivals), mine)

    def _move(
        self,
        arrivals: Sequence[Arrival],
        targets: Sequence[Sequence[int]],
        mine: Mapping[int, Group],
    ) -> dict[int, list[Group]]:
        """Sends each arrival's parts to its target ranks; returns, in row order, the parts of those that live here."""
        outgoing = [[a.serial for a, to in zip(arrivals, targets, strict=True) if rank in to and a.sizes[self.rank]]
                    for rank in range(self.ranks)]  # fmt: skip
        here = [arrival for arrival, to in zip(arrivals, targets, strict=True) if self.rank in to]
        incoming = [int(sum(arrival.sizes[rank] for arrival in here)) for rank in range(self.ranks)]
        received = self._exchange("admit", outgoing, mine.__getitem__, incoming)
        parts: dict[int, list[Group]] = {}
        for serial, sizes in here:
            held = np.flatnonzero(sizes).tolist()
            parts[serial] = [mine[serial] if rank == self.rank else received[rank].pop(0) for rank in held]
        return parts

    def _exchange(
        self,
        verb: str,
        outgoing: Sequence[Sequence[int]],
        load: Callable[[int], Group],
        incoming: Sequence[int] | None,
    ) -> list[list[Group]]:
        """One `all_to_all_single` of packed groups.

        Args:
            verb (`str`): For the count of bytes.
            outgoing (`Sequence[Sequence[int]]`): Per rank, the serials to send, in an order that the receiver knows.
            load (`Callable`): Gives the payload of a serial; called once for each that another rank needs.
            incoming (`Sequence[int]`, *optional*): Per rank, the bytes to receive; this rank's own do not count. None
                if only the sender knows: then the numbers go first, 8 bytes from each rank.

        Returns:
            Per rank, the groups received.
        """
        if self.ranks == 1:
            return [[]]
        import torch

        from ..serialization.wire import pack, unpack

        sending = [[] if rank == self.rank else list(serials) for rank, serials in enumerate(outgoing)]
        packed = {s: pack(load(s), self.names) for s in dict.fromkeys(s for serials in sending for s in serials)}
        flat = torch.cat(
            [
                torch.empty(0, dtype=torch.uint8),
                *(packed[s] for serials in sending for s in serials),
            ]
        )
        out_sizes = [sum(packed[s].numel() for s in serials) for serials in sending]
        if incoming is None:
            ones = [1] * self.ranks
            incoming = self._all_to_all(torch.tensor(out_sizes), ones, ones).tolist()
            self.received[verb] += 8 * (self.ranks - 1)
        in_sizes = [0 if rank == self.rank else int(size) for rank, size in enumerate(incoming)]
        received = self._all_to_all(flat, out_sizes, in_sizes)
        self.received[verb] += sum(in_sizes)
        return [unpack(part, self.names) for part in torch.split(received, in_sizes)]

    def _all_to_all(self, flat: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        device = self.accelerator.device  # NCCL takes device tensors only
        received = torch.empty(sum(in_sizes), dtype=flat.dtype, device=device)
        dist.all_to_all_single(received, flat.to(device), in_sizes, out_sizes)
        return received.cpu()


class ShardedScope(GatheredScope):
    """One buffer whose metadata every process has and whose payload is held once.

    A group's payload stays where it was generated, unless that process holds more than `slack` groups above the one
    that holds least; then that one takes it. Only groups that are drawn travel, to the slots that they fill.
    """

    def __init__(self, accelerator: Any, names: Sequence[str] = (), slack: int = 8) -> None:
        super().__init__(accelerator, names)
        if isinstance(slack, bool) or not isinstance(slack, int) or slack < 1:
            raise ConfigurationError(
                f"sharded: slack={slack!r} can't be used: give a whole number of groups, at least 1."
            )
        self.slack = slack

    def admit(
        self,
        table: Table,
        arrivals: Sequence[Arrival],
        mine: Mapping[int, Group],
    ) -> dict[int, list[Group]]:
        """Chooses an owner for each arrival and moves what was generated elsewhere."""
        newcomers = np.isin(table.serial, [arrival.serial for arrival in arrivals])
        loads = np.bincount(table.owner[~newcomers], minlength=self.ranks)
        owners = []
        for arrival in arrivals:
            born = int(np.argmax(arrival.sizes))
            owner = born if loads[born] - loads.min() < self.slack else int(np.argmin(loads))
            loads[owner] += 1
            owners.append(owner)
            table.owner[table.serial == arrival.serial] = owner
        return self._move(arrivals, [[owner] for owner in owners], mine)

    def fetch(self, requests: Sequence[Request], load: Callable[[int], Group]) -> dict[int, Group]:
        """Owners send drawn groups to the ranks whose slots they fill; a slot that straddles ranks, to each of them.

        Only the owner knows what its storage gives out (a storage may compress), so sizes go before payload.
        """
        outgoing = [
            [r.serial for r in requests if r.owner == self.rank and rank in r.ranks] for rank in range(self.ranks)
        ]
        received = self._exchange("fetch", outgoing, load, incoming=None)
        needed = [request for request in requests if self.rank in request.ranks]
        return {r.serial: load(r.serial) if r.owner == self.rank else received[r.owner].pop(0) for r in needed}
