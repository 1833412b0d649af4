"""Have all processes come to the same call of ours? Asked before they say anything to each other outside of a batch.

A collective that one process begins alone pairs with whatever the others come to next, a gather of the trainer's say:
they wait for ever, get each other's bytes, or abort. So each process first leaves its name in the key-value store that
torch.distributed was started with, and goes on when all names are there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import SeamError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE = 30.0
"""Seconds after which a process that waits says for whom."""


class RollCall:
    """The roll calls of one session. Sessions are told apart by their number among those that have met the others'.

    Args:
        rank (`int`): This process.
        processes (`int`): How many there are. Of one, nothing is asked.
        timeout (`float`): Seconds to wait for the others.
        kind (`str`): What must be the same on all processes; those of another kind do not count as present.
    """

    _met = 0

    def __init__(self, rank: int = 0, processes: int = 1, timeout: float = 0.0, kind: str = "") -> None:
        self._rank = rank
        self._processes = processes
        self._timeout = timeout
        self._kind = kind
        self._number: int | None = None
        self._calls: Counter[str] = Counter()

    def __call__(self, call: str, doing: str, timeout: float | None = None) -> None:
        """Waits until every process has come to this call as often as this one.

        Args:
            call (`str`): What is called; each name has a count of its own.
            doing (`str`): The same as words after "Replay waits with".
            timeout (`float`, *optional*): Seconds, where it is less than the session's.

        Raises:
            SeamError: Some process did not come: names it. Nothing was sent.
        """
        store = store_of_all() if self._processes > 1 else None
        if store is None:
            return
        number = RollCall._met if self._number is None else self._number
        key = f"trl_replay/{number}/{call}/{self._calls[call]}"
        self._enter(store, key, doing, min(timeout or self._timeout, self._timeout))
        self._calls[call] += 1
        if self._number is None:
            self._number = number
            RollCall._met += 1

    def _enter(self, store: Store, key: str, doing: str, timeout: float) -> None:
        present = f"{key}/{self._kind}"
        store.set(f"{key}/{self._rank}", self._kind)
        if store.add(f"{present}/count", 1) == self._processes:
            store.set(f"{present}/all", "1")
        if _came(store, f"{present}/all", min(timeout, PATIENCE)):
            return
        if timeout > PATIENCE:
            warnings.warn(f"{self._missing(store, key, doing)} It waits for {timeout:g} seconds.", stacklevel=4)
            if _came(store, f"{present}/all", timeout - PATIENCE):
                return
        problem = self._missing(store, key, doing)
        store.add(f"{present}/count", -1)
        raise SeamError(
            f"{problem} It must be done on every process, with the same settings. What the others wait for now is the "
            "trainer's."
        )

    def _missing(self, store: Store, key: str, doing: str) -> str:
        absent, different = list[str](), list[str]()
        for rank in range(self._processes):
            if not store.check([f"{key}/{rank}"]):
                absent.append(str(rank))
            elif store.get(f"{key}/{rank}").decode() != self._kind:
                different.append(str(rank))
        told = [f"rank {', '.join(absent)} did not come to it"] if absent else []
        told += [f"rank {', '.join(different)} came with other settings"] if different else []
        return f"Replay waits on rank {self._rank} with {doing}: {' and '.join(told) or 'the others came too late'}."


def _came(store: Store, key: str, timeout: float) -> bool:
    """Whether a key is there before the time is over."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError:  # all of torch's stores raise one of its kinds
        return False
    return True


def store_of_all() -> Store | None:
    """The store of the default process group; None where torch.distributed does not run."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return _get_default_store()
