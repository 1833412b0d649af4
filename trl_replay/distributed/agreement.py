"""Where processes agree: on what failed, on what each has decided, and on who takes part."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from accelerate.utils import gather_object
from numpy.typing import ArrayLike, NDArray

from .. import compat
from ..data.counters import COUNTERS
from ..data.types import Floats
from ..errors import ConfigurationError, ReplayError, SeamError
from ..protocols import Agreement
from ..setup.settings import Settings
from ..strategies.scopes import Scope

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")


def run_on_all_ranks(
    action: Callable[[], Result], failure: type[ReplayError], alone: bool = False
) -> list[Result | None]:
    """Run `action` on every process and wait for all. If it fails on one, all raise: one of our errors unchanged,
    otherwise `failure`.

    Args:
        action (`Callable`): What to do.
        failure (`type`): What other errors become.
        alone (`bool`, *optional*): This process does it and waits for no other.

    Returns:
        What it gave on each process, in the order of ranks.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    text = f"{type(error).__name__}: {error}" if error else ""
    gathered = [(text, result)] if alone else gather_object([(text, result)])
    errors = [text for text, _ in gathered]
    if isinstance(error, ReplayError):
        raise error
    if any(errors):
        raise failure(join_errors(errors)) from error
    return [result for _, result in gathered]


def join_errors(errors: Sequence[str]) -> str:
    """Join the errors of all ranks into one sentence; the error of one process stays unchanged."""
    if len(errors) == 1:
        return errors[0]
    named = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    return "; ".join(named)


ROUNDING = 1e-6
"""Of the sum of a batch's advantages, the share by which machines may differ."""


class Message:
    """Named numbers, sent as one vector of float64.

    Args:
        **shapes (`tuple[int, ...]`): Of each field, in order; `()` for one number.
    """

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._dtype = np.dtype([(name, np.float64, shape) for name, shape in shapes.items()])

    @property
    def width(self) -> int:
        """Length of the vector."""
        return self._dtype.itemsize // np.dtype(np.float64).itemsize

    def pack(self, **values: ArrayLike) -> Floats:
        """Pack fields into a vector, `(width,)`; missing fields are 0."""
        record = np.zeros(1, self._dtype)
        for name, value in values.items():
            record[name] = value
        return record.view(np.float64)

    def unpack(self, vectors: Floats) -> NDArray[np.void]:
        """Unpack vectors, `(ranks, width)`, into `(ranks,)` records with a field per name."""
        return np.ascontiguousarray(vectors).view(self._dtype)[:, 0]


@cache
def decision_message() -> Message:
    """Define the message of a process: counters, the leader of its buffer, a hash of its decisions, and sums of its
    advantages."""
    return Message(counters=(len(COUNTERS),), leader=(), decided=(), advantages=(2,))


def reason_of_failure(agreement: Agreement) -> str:
    """Describe what failed on which process; empty if nothing did."""
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(agreement.errors) if text]
    return "; ".join(failures)


def reason_of_decisions(leaders: Floats, decided: Floats, advantages: Floats) -> str:
    """Describe different decisions of processes that share a buffer; empty if there are none.

    Args:
        leaders (`(ranks,)`): Of each process, the first of those that share its buffer.
        decided (`(ranks,)`): Of each, a hash of what it decided.
        advantages (`(ranks, 2)`): Of each, two sums of the advantages of all shared rows, the second of their sizes.
    """
    if len(leaders) == 1:
        return ""
    differing = np.unique(np.stack([leaders, decided]), axis=1)
    if differing.shape[1] > len(np.unique(leaders)):
        return (
            "Processes that share a buffer decided differently. Strategies must do the same on every rank and draw "
            "from context.rng only; clear a session on all ranks."
        )
    sums, sizes = advantages.T
    _, places, group = np.unique(leaders, return_index=True, return_inverse=True)
    first = places[group]
    if (np.abs(sums - sums[first]) > ROUNDING * np.maximum(sizes, sizes[first])).any():
        return (
            "Processes that share a buffer give its rows different advantages. Plugins must compute them alike on "
            "every rank, from what they are given: it holds the rows of all ranks."
        )
    return ""


OF_TRAINER = (
    "beta",
    "num_iterations",
    "loss_type",
    "importance_sampling_level",
    "scale_rewards",
    "multi_objective_aggregation",
    "mask_truncated_completions",
    "max_completion_length",
    "max_steps",
    "gradient_accumulation_steps",
)
"""Settings of `GRPOConfig` that must be equal, or ranks wait for each other or train on a mixture."""
PATIENCE = 30.0
"""Seconds after which a process that waits says for whom."""
MEETING = 600.0
"""Seconds that a process waits for the others when training begins: the main one may be starting a tracker's run."""
RANKS_SHOWN = 8
"""Ranks that are named, of more."""


class RollCall:
    """Barriers of one session, numbered so that sessions don't mix.

    Args:
        rank (`int`): This process.
        processes (`int`): How many there are. Of one, nothing is asked.
        timeout (`float`): Seconds to wait for the others.
        equal (`Mapping[str, Any]`): By name, what must be equal on all processes; JSON can hold it.

    Attributes:
        training (`bool`): Whether all have met since training began.
    """

    _met = 0

    def __init__(
        self, rank: int = 0, processes: int = 1, timeout: float = 0.0, equal: Mapping[str, Any] | None = None
    ) -> None:
        self._rank = rank
        self._processes = processes
        self._timeout = timeout
        plain = json.loads(json.dumps(equal or {}), parse_float=_whole)
        self._equal = json.dumps(plain, sort_keys=True)
        self.training = False
        self._number: int | None = None
        self._calls: Counter[str] = Counter()

    def __call__(self, call: str, doing: str, timeout: float | None = None) -> None:
        """Wait until every process has reached this call as often as this one. The first call also compares settings.

        Args:
            call (`str`): What is called; each name has a count of its own.
            doing (`str`): The same as words after "Replay waits with".
            timeout (`float`, *optional*): Seconds, where it is less than the session's.

        Raises:
            SeamError: Some process did not come: names it. Nothing was sent.
            ConfigurationError: What must be equal is not: names it with all values, on all processes.
        """
        store = store_of_all() if self._processes > 1 else None
        if store is None:
            return
        most = min(timeout or self._timeout, self._timeout)
        if self._number is None:
            self._compare(store, doing, most)
        self._enter(store, f"trl_replay/{self._number}/{call}/{self._calls[call]}", doing, most)
        self._calls[call] += 1

    def for_training(self) -> None:
        """When training begins, once."""
        if not self.training:
            self("train", "training", MEETING)
            self.training = True

    def announce_inactive(self) -> None:
        """Announce, without waiting, a session that does nothing and reaches no call."""
        store = store_of_all() if self._processes > 1 else None
        if store is None:
            return
        key = self._announce(store)
        store.set(f"{key}/equal/{self._rank}", self._equal)
        for step in ("", "/told", "/read"):
            self._come(store, key + step)
        RollCall._met += 1

    def _compare(self, store: Store, doing: str, timeout: float) -> None:
        """Compare digests of settings; only if these differ, exchange the settings."""
        key = self._announce(store)
        self._enter(store, key, doing, timeout)
        self._number = RollCall._met
        RollCall._met += 1
        if not store.check([f"{key}/differ"]):
            return
        store.set(f"{key}/equal/{self._rank}", self._equal)
        self._meet(store, f"{key}/told", PATIENCE)
        keys = {rank: f"{key}/equal/{rank}" for rank in range(self._processes)}
        told = {rank: json.loads(store.get(equal)) for rank, equal in keys.items() if store.check([equal])}
        self._meet(store, f"{key}/read", PATIENCE)  # the store may end with its process
        raise ConfigurationError(
            f"Replay's settings differ between ranks: {'; '.join(_differences(told))}. Attach with the same "
            "settings, plugins and releases on all ranks."
        )

    def _announce(self, store: Store) -> str:
        """Store the digest, or mark that it differs from the first one; return the key."""
        key = f"trl_replay/{RollCall._met}/settings"
        digest = hashlib.sha256(self._equal.encode()).hexdigest()
        if store.compare_set(f"{key}/digest", "", digest).decode() != digest:
            store.set(f"{key}/differ", "1")
        return key

    def _come(self, store: Store, key: str) -> None:
        """Register this rank; the last one releases all."""
        store.set(f"{key}/{self._rank}", "1")
        if store.add(f"{key}/count", 1) == self._processes:
            store.set(f"{key}/all", "1")

    def _meet(self, store: Store, key: str, timeout: float) -> bool:
        """Whether all ranks arrived in time."""
        self._come(store, key)
        return _came(store, f"{key}/all", timeout)

    def _enter(self, store: Store, key: str, doing: str, timeout: float) -> None:
        if self._meet(store, key, min(timeout, PATIENCE)):
            return
        if timeout > PATIENCE:
            warnings.warn(f"{self._missing(store, key, doing)} It waits for {timeout:g} seconds.", stacklevel=4)
            if _came(store, f"{key}/all", timeout - PATIENCE):
                return
        problem = self._missing(store, key, doing)
        store.add(f"{key}/count", -1)
        raise SeamError(
            f"{problem} Call it on every process. The other processes are waiting for the trainer instead."
        )

    def _missing(self, store: Store, key: str, doing: str) -> str:
        absent = [rank for rank in range(self._processes) if not store.check([f"{key}/{rank}"])]
        told = f"{_ranks(absent)} did not reach it" if absent else "the others came too late"
        return f"Replay waits on rank {self._rank} with {doing}: {told}."


def roll_call_of(trainer: Any, settings: Settings, scope: Scope) -> RollCall:
    """Return the barriers of a session with these settings."""
    equal = settings.equal_on_ranks(scope.one_buffer, int(trainer.args.seed))
    if settings.acts:  # else any trainer will do
        equal |= {name: getattr(trainer.args, name, None) for name in OF_TRAINER}
        weights = compat.reward_setup(trainer).weights.tolist()
        equal["reward functions and weights"] = list(zip(trainer.reward_func_names, weights, strict=True))
        equal["num_generations"] = trainer.num_generations
        equal |= {"the release of TRL": compat.installed(), "the release of NumPy": np.__version__}
        equal["rows a process (per_device_train_batch_size × steps_per_generation)"] = compat.local_rows(trainer)
    rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    return RollCall(int(rank), int(ranks), float(trainer.args.ddp_timeout), equal)


def _whole(text: str) -> float:
    """Return the number of a JSON text; 50.0 is 50."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _differences(told: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what differs, with all of its values and the ranks that have them: `a is 1 on rank 0 and 2 on rank 1`."""
    for name in sorted(set.intersection(*map(set, told.values()))):
        ranks_of: dict[str, list[int]] = {}
        for rank, equal in told.items():
            ranks_of.setdefault(repr(equal[name]), []).append(rank)
        if len(ranks_of) > 1:
            yield f"{name} is {' and '.join(f'{value} on {_ranks(ranks)}' for value, ranks in ranks_of.items())}"


def _ranks(numbers: Sequence[int]) -> str:
    """Format ranks: `rank 0`, `ranks 0, 2`, and only the first of many."""
    shown = ", ".join(map(str, numbers[:RANKS_SHOWN])) + (", …" if len(numbers) > RANKS_SHOWN else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _came(store: Store, key: str, timeout: float) -> bool:
    """Whether a key appears before the timeout."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError:  # all of torch's stores raise one of its kinds
        return False
    return True


def store_of_all() -> Store | None:
    """Return the store of the default process group; None if torch.distributed does not run."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return _get_default_store()
