"""Scopes: which processes share a buffer. A step communicates through their four verbs only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base.files import counted
from ..data.table import Table
from ..data.types import Floats, Group, Ints, Packed
from ..errors import ReplayError
from ..protocols import Agreement, Arrival, Columns, Load, Request

if TYPE_CHECKING:
    import torch

Payload: TypeAlias = Mapping[int, Packed]
"""Packed groups by serial number."""
Parts: TypeAlias = dict[int, list[Packed]]
"""Per serial number, the parts of a group in row order."""
ERROR_BYTES = 4096
"""The most of an error's text that `agree` sends; longer ones are cut."""
VERBS = ("share", "agree", "admit", "fetch")
SCOPES = ("process", "gathered")
"""The built-in ones."""
SLACK = 8
"""Groups that a process may hold more than the one that holds least."""
FEW_GROUPS = 4
"""Groups a process and batch below which one buffer for all processes finds more to replay."""


class UnreadableError(ReplayError):
    """What has arrived is no group. No rank waits for another then."""


class Collectives:
    """Collectives of scopes, as bytes. Holds no trainer and no accelerator.

    Attributes:
        rank (`int`): This process.
        ranks (`int`): Number of processes.
        received (`dict[str, int]`): Bytes that came from other processes so far, by verb.
    """

    def __init__(self, accelerator: Any) -> None:
        alone = accelerator is None
        self.rank = 0 if alone else int(accelerator.process_index)
        self.ranks = 1 if alone else int(accelerator.num_processes)
        self._device = None if alone else accelerator.device  # NCCL takes device tensors only
        self.received = dict.fromkeys(VERBS, 0)

    def all_gather(self, verb: str, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Gather every rank's bytes, `(ranks, bytes)`; all ranks send equally many."""
        if self.ranks == 1:
            return mine[None]
        import torch
        from accelerate.utils import gather

        tensor = torch.from_numpy(mine.copy()).to(self._device)
        gathered: NDArray[np.uint8] = gather(tensor[None]).cpu().numpy()
        self.received[verb] += gathered.nbytes - mine.nbytes
        return gathered

    def exchange(
        self, verb: str, outgoing: Sequence[Sequence[int]], load: Callable[[int], Packed], crossing: bool
    ) -> list[list[Packed]]:
        """Exchange sizes (8 bytes from each rank) and groups in two `all_to_all_single`; return None if no group
        moves.

        Args:
            verb (`str`): For the count of bytes.
            outgoing (`Sequence[Sequence[int]]`): Per rank, the serials to send, in an order that the receiver knows;
                this rank's own do not count.
            load (`Callable`): Gives the payload of a serial; called once for each that another rank needs.
            crossing (`bool`): Whether any rank sends another one a group; the same on all.

        Returns:
            Per rank, the groups received.
        """
        if not crossing:
            return [[] for _ in range(self.ranks)]
        import torch

        from ..serialization.groups import from_bytes, to_bytes

        messages = [() if rank == self.rank else tuple(serials) for rank, serials in enumerate(outgoing)]
        loaded = {serial: load(serial) for serial in dict.fromkeys(itertools.chain(*messages))}
        packed = {serials: to_bytes([loaded[serial] for serial in serials]) for serials in set(messages)}
        sending = [packed[serials] for serials in messages]  # several ranks may get the same
        out_sizes = [len(message) for message in sending]
        in_sizes = self._sizes_from(verb, out_sizes)
        received = self._all_to_all(torch.cat(sending), out_sizes, in_sizes)
        self.received[verb] += sum(in_sizes)
        try:
            return [from_bytes(part) for part in torch.split(received, in_sizes)]
        except Exception as error:
            raise UnreadableError(f"groups that other ranks sent can't be read: {error}") from error

    def _sizes_from(self, verb: str, out_sizes: list[int]) -> list[int]:
        """Return the bytes that every rank is about to send to this one."""
        import torch

        ones = [1] * self.ranks
        sizes: list[int] = self._all_to_all(torch.tensor(out_sizes), ones, ones).tolist()
        self.received[verb] += 8 * (self.ranks - 1)
        return sizes

    def _all_to_all(self, flat: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        received = torch.empty(sum(in_sizes), dtype=flat.dtype, device=self._device)
        dist.all_to_all_single(received, flat.to(self._device), in_sizes, out_sizes)
        return received.cpu()


class Scope:
    """The processes that share a buffer, and all communication of theirs: every rank calls the same verbs in the same
    order, once a batch and round, after an error too.

    Every process has the table, and payload is stored once: where it was generated, unless that process holds `SLACK`
    groups or more above the one that holds least; then that one takes it. Only groups that are drawn travel. A process
    alone sees its own rows, and all that it does with them stays here.

    Attributes:
        one_buffer (`bool`): Whether all processes share it (`gathered`); else each is alone (`process`).
    """

    def __init__(self, accelerator: Any, one_buffer: bool = False) -> None:
        self.one_buffer = one_buffer
        self._collectives = Collectives(accelerator)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self._collectives.ranks

    @property
    def rank(self) -> int:
        """This process."""
        return self._collectives.rank

    @property
    def received(self) -> dict[str, int]:
        """Bytes that came from other processes so far, by verb."""
        return self._collectives.received

    def agree(self, vector: Floats, error: str) -> Agreement:
        """Gather every rank's vector in one all-gather, and in a second one the texts of errors, if any."""
        text = np.frombuffer(error.encode()[:ERROR_BYTES], np.uint8)
        mine = np.append(vector.astype(np.float64), len(text))
        gathered = self._collectives.all_gather("agree", mine.view(np.uint8))
        numbers = np.ascontiguousarray(gathered).view(np.float64)
        lengths = numbers[:, -1].astype(np.int64)
        return Agreement(numbers[:, :-1], self._texts(text, lengths))

    def _texts(self, mine: NDArray[np.uint8], lengths: Ints) -> list[str]:
        """Return every rank's text; all know the lengths, so nothing is sent if all are empty."""
        longest = int(lengths.max())
        if not longest:
            return [""] * len(lengths)
        padded = np.zeros(longest, np.uint8)
        padded[: len(mine)] = mine
        rows = self._collectives.all_gather("agree", padded)
        texts = []
        for row, length in zip(rows, lengths.tolist(), strict=True):
            word = row[:length].tobytes()
            texts.append(word.decode(errors="replace"))
        return texts

    def share(self, columns: Columns) -> Columns:
        """All-gather this process's rows of all columns."""
        if not self.one_buffer:
            return columns
        as_bytes = [np.ascontiguousarray(column).view(np.uint8) for column in columns.values()]
        gathered = self._collectives.all_gather("share", np.concatenate(as_bytes))
        by_column = gathered.reshape(self.ranks, len(columns), -1)
        shared = {}
        for number, (name, column) in enumerate(columns.items()):
            rows = np.ascontiguousarray(by_column[:, number])
            shared[name] = rows.view(column.dtype).ravel()
        return shared

    def admit(self, table: Table, arrivals: Sequence[Arrival], mine: Payload) -> Parts:
        """Choose an owner for each arrival, and move payload that was generated elsewhere."""
        rows = table.rows_of([arrival.serial for arrival in arrivals])
        loads = np.bincount(table.owner, minlength=self.ranks)
        loads -= np.bincount(table.owner[rows], minlength=self.ranks)
        owners: list[int] = []
        for arrival in arrivals:
            born = int(np.argmax(arrival.sizes))
            ahead = loads[born] - loads.min()
            owner = born if ahead < SLACK or not self.one_buffer else int(np.argmin(loads))
            loads[owner] += 1
            owners.append(owner)
        table.writable("owner")[rows] = owners
        return self._send(arrivals, owners, mine)

    def fetch(self, requests: Sequence[Request], load: Load) -> dict[int, Group]:
        """Send drawn groups from their owners to the ranks with rows of their slots."""
        from ..serialization.groups import pack, unpack

        outgoing: list[list[int]] = [[] for _ in range(self.ranks)]
        for request in requests:
            if request.owner == self.rank:
                for rank in request.ranks:
                    outgoing[rank].append(request.serial)
        crossing = any(rank != request.owner for request in requests for rank in request.ranks)
        received = self._collectives.exchange("fetch", outgoing, lambda serial: pack(load(serial)), crossing)
        groups = {}
        for serial, owner, ranks in requests:
            if self.rank not in ranks:
                continue
            if owner == self.rank:
                groups[serial] = load(serial)
            else:
                groups[serial] = unpack(received[owner].pop(0))
        return groups

    def _send(self, arrivals: Sequence[Arrival], owners: Sequence[int], mine: Payload) -> Parts:
        """Send this rank's part of each arrival to the arrival's owner.

        Returns:
            Per serial that lives here, the parts of the group in row order.
        """
        outgoing: list[list[int]] = [[] for _ in range(self.ranks)]
        born = [np.flatnonzero(arrival.sizes).tolist() for arrival in arrivals]
        moves = list(zip(arrivals, born, owners, strict=True))
        for arrival, ranks, owner in moves:
            if self.rank in ranks:
                outgoing[owner].append(arrival.serial)
        crossing = any(ranks != [owner] for _, ranks, owner in moves)
        received = self._collectives.exchange("admit", outgoing, mine.__getitem__, crossing)
        parts: Parts = {}
        for arrival, ranks, owner in moves:
            if owner == self.rank:
                serial = arrival.serial
                parts[serial] = [mine[serial] if rank == self.rank else received[rank].pop(0) for rank in ranks]
        return parts


class ScopeChoice(NamedTuple):
    """A chosen scope, with the reason."""

    name: str
    reason: str


def choose_scope(processes: int, rows: int, size: int) -> ScopeChoice:
    """Choose the scope for a layout.

    Args:
        processes (`int`): How many there are.
        rows (`int`): Rows of each process's generation batch.
        size (`int`): `num_generations`.
    """
    groups, rest = divmod(rows, size)
    if processes == 1:
        return ScopeChoice("process", "there is one process")
    if rest:
        return ScopeChoice("gathered", f"groups of {size} straddle processes of {rows} rows each")
    each = f"each process has {counted(groups, 'group')} a batch"
    if groups < FEW_GROUPS:
        return ScopeChoice("gathered", f"{each}, fewer than {FEW_GROUPS}: one buffer for all finds more to replay")
    return ScopeChoice("process", f"{each}, and all of their rows")
