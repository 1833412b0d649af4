"""Which process is missing when a collective fails: torch tells how it failed (a connection was closed, a time is up),
not because of whom.

Before each collective of a step a process leaves a mark in the key-value store that torch.distributed was started
with: 50 bytes, for which it waits for nobody. Marks are read when something has failed, and never before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING

from ..errors import ReplayError
from .roll_call import store_of_all

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

KEY = "trl_replay/whereabouts"
ANSWER = 10.0
"""Seconds in which the store must have told all marks."""


class Whereabouts:
    """The marks of one process, and what an error is told by those of all.

    Args:
        rank (`int`): This process.
        processes (`int`): How many there are. One leaves no marks.
    """

    _collectives = 0

    def __init__(self, rank: int, processes: int) -> None:
        self._rank = rank
        self._processes = processes

    @contextmanager
    def at(self, verb: str, update: int) -> Iterator[None]:
        """Leaves a mark; an error of torch's inside is told where this process is, and who has not come there.

        Args:
            verb (`str`): Of the scope.
            update (`int`): Updates done.
        """
        if self._processes == 1:
            yield
            return
        Whereabouts._collectives += 1  # of all sessions: those that come later must not seem to be behind
        here = f"`{verb}` at update {update}"
        store = _asked_without_waiting()
        if store is not None:
            with suppress(RuntimeError):  # where its process has ended, the collective itself tells
                mark = f"{Whereabouts._collectives} {here}"
                store.set(f"{KEY}/{self._rank}", mark)
        try:
            yield
        except ReplayError:
            raise
        except RuntimeError as error:
            if _is_of_a_collective(error):
                where = f"rank {self._rank} of {self._processes} in {here}"
                others = self._others(store)
                error.add_note(f"Replay failed on {where}{others}")
            raise

    def _others(self, store: Store | None) -> str:
        """Where the others are, as the rest of a sentence."""
        if store is None:
            return ". What the others printed last tells why."
        marks: dict[int, tuple[int, str]] = {}
        asking = Thread(target=_read, args=(store, self._processes, marks), daemon=True)
        asking.start()
        asking.join(ANSWER)  # the process that keeps the store may hang
        if len(marks) < self._processes:
            return (
                ". Where the others are can't be told: the process that keeps the store of torch.distributed has "
                "ended or hangs (rank 0, unless torchrun keeps it)."
            )
        behind: dict[str, list[int]] = {}
        for rank, (count, where) in sorted(marks.items()):
            if count < Whereabouts._collectives:
                behind.setdefault(where, []).append(rank)
        if not behind:
            return (
                ", to which all have come: another process ended in it, or gave up waiting there (ddp_timeout). What "
                "the others printed last tells why."
            )
        told = []
        for where, ranks in behind.items():
            told.append(f"rank {in_words(ranks)}, which came last to {where}")
        missing = "; ".join(told)
        return (
            f", to which not all have come. Missing: {missing}. Such a process has ended, hangs, or comes later than "
            "ddp_timeout allows: what it printed last tells why."
        )


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed may have raised it: an error of another kind, such as an OutOfMemoryError, is this
    process's own, and nobody else is to blame."""
    from torch.distributed import DistError

    return type(error) is RuntimeError or isinstance(error, DistError)


def _read(store: Store, processes: int, marks: dict[int, tuple[int, str]]) -> None:
    """The marks of all processes, with the number of collectives that each has come to."""
    with suppress(RuntimeError):  # the store's process has ended: some are missing
        for rank in range(processes):
            key = f"{KEY}/{rank}"
            text = store.get(key).decode() if store.check([key]) else "0 none of replay's collectives"
            count, _, where = text.partition(" ")
            marks[rank] = int(count), where


def in_words(ranks: Sequence[int]) -> str:
    """Ascending numbers, runs of three or more by their ends: 0, 2-5, 9."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = []
    for run in runs:
        if len(run) > 2:
            told.append(f"{run[0]}-{run[-1]}")
        else:
            told += [str(rank) for rank in run]
    return ", ".join(told)


def _asked_without_waiting() -> Store | None:
    """The store, if it is one that takes a mark without making anybody wait or keeping all earlier ones."""
    store = store_of_all()
    if store is None:
        return None
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    kept = store
    while isinstance(kept, PrefixStore):
        kept = kept.underlying_store
    return store if isinstance(kept, TCPStore) else None
