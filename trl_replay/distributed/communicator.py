"""A session's communication with other processes: share, agree, admit and fetch, in this order for every batch."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from accelerate.utils import gather_object
from numpy.typing import ArrayLike, NDArray

from .. import compat
from ..batch.compose import check, join, take_rows
from ..batch.groups import TOLD_ITEMS, PendingGroups, blank, describe, with_environments
from ..data.counters import COUNTERS, Tally
from ..data.plan import Plan
from ..data.table import Table
from ..data.tasks import task_of_group
from ..data.types import NONE, PIXELS, Batch, Floats, Group, Ints, Packed, Placement
from ..errors import BatchError, ConfigurationError, ReplayError, SeamError
from ..protocols import Agreement, Arrival, Columns, Request
from ..serialization.groups import pack, unpack
from ..setup.settings import Components, Settings
from ..strategies.scopes import Scope, UnreadableError

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
        equal |= {"the release of TRL": str(compat.installed()), "the release of NumPy": np.__version__}
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


@dataclass(frozen=True, slots=True)
class Admitted:
    """New entries that the table has accepted.

    Attributes:
        arrivals (`list[Arrival]`): All of them, the same on all processes that share the buffer.
        mine (`dict[int, Packed]`): This process's rows of them, by serial.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    mine: dict[int, Packed] = field(default_factory=dict)

    @property
    def serials(self) -> list[int]:
        """Their serial numbers."""
        return [arrival.serial for arrival in self.arrivals]


@dataclass(frozen=True, slots=True)
class Decision:
    """All that is decided about one batch.

    Attributes:
        tally ([`Tally`]): What was counted on the way.
        admitted ([`Admitted`]): Newcomers whose payload is to be moved into the buffer.
        plan ([`Plan`]): What every row trains on.
        priorities (`dict[int, float]`): Of each entry of the plan, its chance to be drawn first relative to that of
            the least likely eligible entry; 1 where it is not given.
        candidates (`list[int]`): Slots of the live groups that are to be stored once their log-probs are known.
    """

    tally: Tally = field(default_factory=Tally)
    admitted: Admitted = field(default_factory=Admitted)
    plan: Plan = field(default_factory=Plan.nothing)
    priorities: dict[int, float] = field(default_factory=dict)
    candidates: list[int] = field(default_factory=list)


_Value = TypeVar("_Value", bound=np.generic)
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without whole parts, are spread over 0 to 1: no two rows count alike."""
NO_LENGTHS: Ints = np.empty(0, np.int64)
MISSING = Group({}, frozenset(), NO_LENGTHS, NO_LENGTHS)
"""Travels in the place of a group that its owner failed to give out, so that nobody waits for it."""


class Exchange(NamedTuple):
    """A fresh group that replaces another group, with rows on this process."""

    slot: int
    """Among the groups that the scope shares."""
    target: slice
    """The slot's rows in this process's batch."""
    source: slice
    """The rows of the group that takes it, in the batch that it comes from."""

    def placement(self, group: Group) -> Placement:
        """Place the group, once it is cut out, in its slot."""
        count = self.target.stop - self.target.start
        return Placement(self.slot, group, NONE, age=0, start=self.target.start, count=count)


class SharedRows:
    """The layout of a generation batch's rows: the columns that a scope shared, and this process's part of them.

    Attributes:
        columns (`Mapping[str, NDArray]`): As shared, over all rows that share a buffer.
        size (`int`): Rows of a group.
        count (`int`): Rows of each process.
        first (`int`): Index of this process's first row among those of all processes.
        told_items (`int`, *optional*): `num_items_in_batch`, as it was scored.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]], local: Mapping[str, NDArray[Any]], size: int) -> None:
        self.columns = columns
        self.size = size
        self.count = len(local["row"])
        self.first = int(local["row"][0])
        self.told_items = int(local[TOLD_ITEMS][0]) if TOLD_ITEMS in local else None

    @property
    def leader(self) -> int:
        """The first of the processes that share this buffer."""
        return int(self.columns["row"][0]) // self.count

    @property
    def leads(self) -> bool:
        """Tell whether this process is the first of those that share a buffer."""
        return self.first == int(self.columns["row"][0])

    def check(self, scored: int, processes: int) -> None:
        """Check that groups are whole and in order, and that every row that was scored is there.

        Args:
            scored (`int`): Rows of all processes whose rewards are known.
            processes (`int`): How many there are.

        Raises:
            SeamError: The scope shares parts of groups, or the trainer's batch does not hold what it scored.
        """
        if scored != self.count * processes:
            raise SeamError(
                f"The batch holds {self.count} rows per process, but {scored} rows on {processes} process(es) have "
                "rewards: replay does not support a trainer that drops or adds rows after scoring them. Mask rows "
                "instead: return NaN for them from a plugin's trl_replay_advantages."
            )
        rows: Ints = self.columns["row"]
        if not self._are_whole_groups(rows):
            first = rows.min()
            last = rows.max()
            raise SeamError(
                f"The scope shares rows {first} to {last}, which are not whole groups of {self.size}: with "
                f"{self.count} rows per process, groups straddle processes. Use a scope that assembles them "
                "(gathered), or another batch size."
            )

    def _are_whole_groups(self, rows: Ints) -> bool:
        if len(rows) % self.size:
            return False
        groups = rows.reshape(-1, self.size)
        first_of_group = groups[:, :1] // self.size * self.size
        return bool((groups == first_of_group + np.arange(self.size)).all())

    def fingerprint(self, table: Table, decision: Decision) -> int:
        """Return a 48-bit hash of the buffer's decisions; 0 if this process shares its buffer with none.

        Equal on all processes that share a buffer, or payload would go astray. It holds no advantages, which may
        differ in their last bits between machines: see `sums_of_advantages`.
        """
        if len(self.columns["row"]) == self.count:
            return 0
        plan = decision.plan
        entries = np.where(plan.stored, _serials(table, plan.entry), plan.entry)
        hashed = hashlib.blake2b(np.sort(table.serial).tobytes(), digest_size=6)
        for column in (np.array(decision.admitted.serials, np.int64), entries, *plan.decided()):
            hashed.update(np.int64(column.size).tobytes() + column.tobytes())
        return int.from_bytes(hashed.digest(), "little")

    def sums_of_advantages(self, plan: Plan) -> tuple[float, float]:
        """Return two numbers that are nearly equal on all processes that share a buffer: the sum of the advantages of
        all its rows, each times another number from 1 to 2, and that of their sizes; 0 where nobody shares it."""
        if len(self.columns["row"]) == self.count:
            return 0.0, 0.0
        given = plan.advantages.ravel()
        factors = 1.0 + np.arange(len(given)) * GOLDEN % 1.0
        return float(factors @ given), float(np.abs(given).sum())

    def takes(self, keys: frozenset[str]) -> frozenset[str]:
        """Batch keys that a group needs to fill any slot: `keys`, and that of images if all batches have some."""
        fewest = int(self.columns["images"].min())
        return keys | {PIXELS} if fewest >= 0 else keys

    def holds(self, keys: frozenset[str], slot: int) -> frozenset[str]:
        """Batch keys that the slot's group can restore: `keys`, and that of images if it has one."""
        images = self.columns["images"][slot * self.size : (slot + 1) * self.size]
        return keys | {PIXELS} if int(images.max()) > 0 else keys

    def span(self, slot: int) -> range:
        """Indices of the slot's rows among those of all processes."""
        begin = int(self.columns["row"][slot * self.size])
        return range(begin, begin + self.size)

    def local(self, slot: int) -> tuple[slice, int]:
        """The slot's rows in this process's batch (empty if it has none), and which row of the group comes first."""
        span = self.span(slot)
        begin = max(span.start, self.first)
        end = min(span.stop, self.first + self.count)
        if begin >= end:
            return slice(0, 0), 0
        rows = slice(begin - self.first, end - self.first)
        return rows, begin - span.start

    def exchanges(self, slots: Sequence[int], groups: Sequence[int], other: SharedRows) -> list[Exchange]:
        """Return the groups of this or another batch that take slots and have rows on this process."""
        found = []
        for slot, group in zip(slots, groups, strict=True):
            target, _ = self.local(slot)
            source, _ = other.local(group)
            if target.stop:
                found.append(Exchange(slot, target, source))
        return found

    @property
    def here(self) -> slice:
        """This process's rows among those that are shared."""
        begin = self.first - int(self.columns["row"][0])
        return slice(begin, begin + self.count)

    def arrivals(self, serials: Sequence[int], slots: Sequence[int], ranks: int) -> list[Arrival]:
        """Return the candidates as arrivals, from the shared column `nbytes`."""
        chosen = list(slots)
        nbytes = self.columns["nbytes"].reshape(-1, self.size)[chosen]
        ranks_of_rows = self.columns["row"] // self.count
        owners = ranks_of_rows.reshape(-1, self.size)[chosen]
        number = np.arange(len(chosen))[:, None]
        sizes = np.zeros((len(chosen), ranks), np.int64)
        np.add.at(sizes, (number, owners), nbytes)
        return [Arrival(serial, of_ranks) for serial, of_ranks in zip(serials, sizes, strict=True)]

    def sizes(self, slots: Sequence[int]) -> list[int]:
        """Bytes of payload of the candidates in `slots`."""
        if not slots:
            return []
        by_group = self.columns["nbytes"].reshape(-1, self.size)
        sizes: list[int] = by_group[list(slots)].sum(axis=1).tolist()
        return sizes

    def requests(self, plan: Plan, table: Table) -> list[Request]:
        """List which ranks need the rows of which entry."""
        requests = []
        serials, owners, ranks_of_rows = table.serial, table.owner, self.columns["row"] // self.count
        for entry, rows in plan.drawn():
            ranks = sorted(set(ranks_of_rows[rows].tolist()))
            requests.append(Request(int(serials[entry]), int(owners[entry]), tuple(ranks)))
        return requests

    def of_here(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Slice values of all shared rows, `(n, G)`, to this process's rows, `(count,)`."""
        return values.ravel()[self.here]

    @property
    def slots_here(self) -> slice:
        """Slots with rows on this process."""
        return slice(self.here.start // self.size, -(-self.here.stop // self.size))

    def placements(
        self, decision: Decision, table: Table, update: int, groups: Mapping[int, Group]
    ) -> list[Placement]:
        """Place stored rows on this process, in runs of adjacent ones.

        Args:
            decision ([`Decision`]): With the plan.
            table ([`Table`]): The buffer's.
            update (`int`): Updates done.
            groups (`Mapping[int, Group]`): By serial, the rows of each entry that the plan names, in its order.

        Raises:
            BatchError: A group did not come.
        """
        placements = []
        serials, updates, here = table.serial, table.update, self.here
        for entry, rows in decision.plan.drawn():
            runs: list[list[int]] = []  # the first row, its number among the entry's rows, and how many follow it
            for number, row in enumerate(rows.tolist()):
                if not here.start <= row < here.stop:
                    continue
                if runs and row == runs[-1][0] + runs[-1][2] and row % self.size:
                    runs[-1][2] += 1
                else:
                    runs.append([row, number, 1])
            serial = int(serials[entry])
            if runs and not groups[serial].keys:
                raise BatchError(f"The stored group {serial} can't be replayed: its owner could not load it.")
            for row, number, count in runs:
                placed = Placement(
                    slot=row // self.size,
                    group=groups[serial],
                    serial=serial,
                    age=update - int(updates[entry]),
                    start=row - here.start,
                    first=number,
                    count=count,
                    priority=decision.priorities.get(entry, 1.0),
                )
                placements.append(placed)
        return placements


def _serials(table: Table, entries: Ints) -> Ints:
    """Return the serial of each entry; arbitrary where there is none."""
    if not len(table):
        return entries
    return np.asarray(table.serial[np.maximum(entries, 0)])


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
    ) -> SharedRows:
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

    def share_round(self, batch: Batch) -> SharedRows:
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

    def _share(self, local: Columns) -> SharedRows:
        """Share columns; return the layout of the rows of all processes, each with its group's task."""
        size = self._components.num_generations
        update = self._buffer.clock.update
        shared: Columns = self._components.scope.share({name: of for name, of in local.items() if name != TOLD_ITEMS})
        self.shares += 1
        prompt = task_of_group(shared["prompt"], shared["row"], size, update, self.shares)
        return SharedRows({**shared, "prompt": prompt}, local, size)

    def agree(self, rows: SharedRows, decide: Callable[[], Decided], due: Sequence[int] = ()) -> Agreed[Decided]:
        """Decide, and check that all processes did: counters are summed; an error on any, or different
        decisions, raise on all.

        Of the ranks that share a buffer only the first counts what they decide together; each counts its own bytes.

        Args:
            rows ([`SharedRows`]): Where rows lie.
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

    def _packed(self, message: Message, rows: SharedRows, decision: Decision) -> Floats:
        buffer = self._buffer
        tally = decision.tally
        tally.size = len(buffer)
        tally.tasks = buffer.table.tasks
        tally.bytes = buffer.nbytes + sum(len(payload.data) for payload in decision.admitted.mine.values())
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
            SeamError: Something failed on another process. What failed here, now or before, is raised as it is.
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

    def move(self, rows: SharedRows, decision: Decision) -> dict[int, Group]:
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
