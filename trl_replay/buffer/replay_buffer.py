"""The replay buffer: the policy by which groups enter, are drawn, and leave."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.files import format_bytes
from ..base.progress import Clock, Generators
from ..base.validation import ADAPTIVE, pass_rate_of
from ..data.counters import HELD_BACK, Tally, Totals
from ..data.prompt_table import PromptTable
from ..data.rewards import RewardRule
from ..data.success import Success
from ..data.table import CORE, Table, lowest
from ..data.types import (
    LARGEST_ADVANTAGE,
    NONE,
    PIXELS,
    Bools,
    Context,
    Floats,
    Group,
    GroupKind,
    Groups,
    Ints,
    Packed,
)
from ..errors import CheckpointError, ReplayError
from ..hooks import CheckedHooks
from ..protocols import Stateful
from ..registry import registry
from ..serialization.groups import unpack
from ..specs import Kind

PASS_RATE_BATCHES = 32
"""Generation batches over which the running pass rate averages (exponentially)."""
SPARSE, EVIDENCE, ENOUGH, PATIENCE, RUN_PART = 0.1, 40, 16, 4, 4
"""With `replay_start="adaptive"`: rewards are sparse as long as less than this share of the groups seen were live; so
many groups count as seen from the first batch on. Then replay waits until so many groups were stored, or a quarter of
the buffer's size, as long as live groups keep coming: within so many times their mean distance. It never waits longer
than the run's updates divided by the last number, nor again once it has begun, nor after a warm start. Groups that
have left since count too: with a limit on age or bytes the buffer may never hold so many at once."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The settings `replay_start` and `replay_max_fraction`."""

    start: int | str | None = None
    max_fraction: float = 1.0


def slots_within(max_fraction: float, groups: int) -> int:
    """Return how many of a batch's `groups` a share of them is, rounded down."""
    return int(max_fraction * groups + 1e-9)


SAVED = ("pass_rate", "inserted", "drawn", "seen", "live", "seen_at_live", "prefilled")
"""Attributes of [`RateLimiter`] that a checkpoint keeps."""


class RateLimiter:
    """Applies the limits. Processes that share a buffer give it equal numbers, so it answers alike.

    Args:
        limits ([`RateLimits`]): What may not be exceeded; nothing, if not given.

    Attributes:
        pass_rate (`float`, *optional*): Running share of completions that pass; None before the first batch.
        inserted, drawn (`int`): Newcomers of the buffer so far, and entries that were replayed.
        seen, live, seen_at_live (`int`): Groups generated; live ones of them; groups seen when the last live one came.
        prefilled (`bool`): The buffer was filled from elsewhere: there is nothing to wait for.
    """

    def __init__(self, limits: RateLimits | None = None) -> None:
        self._limits = limits or RateLimits()
        self.pass_rate: float | None = None
        self.inserted = 0
        self.drawn = 0
        self.seen = 0
        self.live = 0
        self.seen_at_live = 0
        self.prefilled = False

    def observe(self, new_groups: Groups, passed: Bools, known: bool = True) -> None:
        """Take note of how a fresh batch went.

        Args:
            new_groups ([`Groups`]): The batch.
            passed (`(n, G)`): Which of its completions passed.
            known (`bool`): Whether that is known.
        """
        scored = int((~new_groups.unscored).sum())
        if not scored:
            return
        if known:
            rate = int(passed.sum()) / scored
            if self.pass_rate is None:
                self.pass_rate = rate
            self.pass_rate += (rate - self.pass_rate) / PASS_RATE_BATCHES
        self.seen += len(new_groups)
        live = len(new_groups) - int(new_groups.dead.sum())
        if live:
            self.live += live
            self.seen_at_live = self.seen

    def slots_allowed(self, groups: int, capacity: int, clock: Clock) -> tuple[int, str]:
        """Return how many of a batch's `groups` replay may fill, and which limit says so.

        Args:
            groups (`int`): Of the fresh batch.
            capacity (`int`): Groups that the buffer may hold, on all processes that share it.
            clock ([`Clock`]): Updates done and planned.
        """
        limits, rate = self._limits, pass_rate_of(self._limits.start)
        if limits.start == ADAPTIVE:
            if self._waits(capacity, clock):
                return 0, "replay_start='adaptive' (sparse rewards, too few entries yet)"
        elif rate is not None:
            if (self.pass_rate or 0.0) < rate:
                return 0, f"replay_start={limits.start!r}"
        elif clock.update < int(limits.start or 0):
            return 0, "replay_start"
        return slots_within(limits.max_fraction, groups), "replay_max_fraction"

    def _waits(self, capacity: int, clock: Clock) -> bool:
        """Tell whether too few groups were stored yet of rewards that are sparse."""
        enough = min(ENOUGH, capacity // 4)
        has_begun = self.prefilled or self.drawn > 0
        if has_begun or not 0 < self.inserted < enough:  # with nothing stored, nothing is held back
            return False
        too_late = clock.planned > 0 and clock.update >= clock.planned // RUN_PART
        is_sparse = self.live < SPARSE * max(self.seen, EVIDENCE)
        return not too_late and is_sparse and self._live_groups_keep_coming()

    def _live_groups_keep_coming(self) -> bool:
        if not self.live:
            return False
        since_live = self.seen - self.seen_at_live
        mean_distance = max(self.seen_at_live, EVIDENCE) / self.live
        return since_live <= PATIENCE * mean_distance

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        for name in SAVED:
            setattr(self, name, state[name])


@dataclass(slots=True)
class Policy:
    """The policy of one buffer.

    Attributes:
        hooks ([`CheckedHooks`]): Scorer, evictor, and sampler, and the plugins next to them.
        limiter ([`RateLimiter`]): How many slots replay may fill.
        success ([`Success`]): What passes.
        reward (`str`, *optional*): The reward function that counts (`replay_reward`); None for the weighted sum.
        max_age (`int`, *optional*): Updates since generation after which an entry leaves.
        max_uses (`int`, *optional*): Replays after which an entry leaves.
        retire_passes (`int`, *optional*): So many passes of a group solve its prompt (`replay_retire_passes`).
        weigh (`Callable`, *optional*): The sampler's weights, if the correction asks for them.
        draws_same_prompt (`bool`): Whether entries are drawn for slots of their own prompt only.
        drops (`bool`): Whether a keep rank of -inf lets an entry leave where there is room.
        stateful (`dict[str, Stateful]`): Strategies whose running state travels with checkpoints, by kind.
    """

    hooks: CheckedHooks
    limiter: RateLimiter = field(default_factory=RateLimiter)
    success: Success = field(default_factory=Success)
    reward: str | None = None
    max_age: int | None = None
    max_uses: int | None = None
    retire_passes: int | None = None
    weigh: Callable[[Table, Context], NDArray[Any]] | None = None
    draws_same_prompt: bool = False
    drops: bool = False
    stateful: dict[str, Stateful] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        scorer: Any = "advantage_std",
        evictor: Any = "prompt_balanced",
        sampler: Any = "prompt_balanced",
        **limits: Any,
    ) -> Policy:
        """A policy with these strategies, for a buffer without a trainer.

        Args:
            scorer, evictor, sampler: Each by name or itself, as in settings.
            **limits: Other attributes of the policy.
        """
        named: dict[Kind, Any] = {"scorer": scorer, "evictor": evictor, "sampler": sampler}
        strategies = {kind: registry().resolve(kind, name) for kind, name in named.items()}
        made = {kind: strategy.make() for kind, strategy in strategies.items()}
        return cls(CheckedHooks([], strategies, made), **limits)

    @property
    def running(self) -> dict[str, Stateful]:
        """All that has running state, by name."""
        return {"rate_limiter": self.limiter, "success": self.success, **self.stateful}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: part.state_dict() for name, part in self.running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave; strategies that are not here any more are passed over.

        Raises:
            CheckpointError: A strategy can't; names it.
        """
        for name, part in self.running.items():
            if name not in state:
                continue
            try:
                part.load_state_dict(state[name])
            except Exception as error:
                raise CheckpointError(
                    f"The {name} ({type(part).__qualname__}) can't take the state that was saved of it: "
                    f"{type(error).__name__}: {error}"
                ) from error


FEW_KINDS = 64
"""So many kinds are kept without an entry."""


class Store:
    """Entries of up to `capacity` groups, and the payload of those that live on this process.

    Attributes:
        table ([`Table`]): The metadata columns.
        capacity (`int`): Groups (not rows, not tokens) that are kept.
        max_bytes (`int`, *optional*): Most bytes of payload and table rows.
    """

    def __init__(self, capacity: int, max_bytes: int | None = None, size: int = 1) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.table = Table.empty(size)
        self._keysets: list[frozenset[str]] = []
        self._kinds: dict[GroupKind, GroupKind] = {}  # one object for all entries of a kind
        self._kind_of: list[GroupKind | None] = []  # by row of the table, as the payload
        self._payload: list[bytes | None] = []
        self._bytes = 0
        self._has_warned = False

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, and the used rows of all columns, with what Python needs for an entry."""
        return self._bytes + len(self.table) * self.table.row_bytes

    def keyset(self, keys: frozenset[str]) -> int:
        """The number that stands for `keys` in the table's column of that name."""
        if keys not in self._keysets:
            self._keysets.append(keys)
        return self._keysets.index(keys)

    def append(self, columns: Mapping[str, NDArray[Any]], rng: np.random.Generator) -> Ints:
        """Put newcomers' columns into the table, whatever room there is; `tag` is drawn here. Return their rows."""
        count, first = len(columns["serial"]), len(self.table)
        tags = 1.0 - rng.random(count)  # in (0, 1]: log(tag) is finite
        self._append({**columns, "tag": tags}, count)
        return np.arange(first, first + count)

    def evict(self, rank: Callable[[Table], NDArray[Any]], drops: bool = False) -> int:
        """Let the lowest keep ranks leave until the rest fits, and of equal ranks the older; return how many left.

        Args:
            rank (`Callable`): Maps the table to keep ranks.
            drops (`bool`): Whether a keep rank of -inf lets an entry leave where there is room.
        """
        table = self.table
        excess = max(len(table) - self.capacity, 0)
        costs, over = None, 0
        if self.max_bytes is not None:
            costs = table.nbytes + table.row_bytes
            over = int(costs.sum()) - self.max_bytes
        if not (excess or over > 0 or (drops and len(table))):
            return 0
        ranks = rank(table)
        if drops:
            excess = max(excess, int(np.isneginf(ranks).sum()))
        leave = lowest(ranks, table.serial, excess)  # of equal ranks the older
        if costs is not None and costs[leave].sum() < over:
            self._warn_of_bytes(costs)
            order = lowest(ranks, table.serial, len(table))
            leave = order[: int(np.argmax(np.cumsum(costs[order]) >= over)) + 1]
        return self.forget(leave)

    def fits(self, nbytes: Ints) -> Bools:
        """Tell whether groups of `nbytes` payload would fit into the buffer alone."""
        most = np.inf if self.max_bytes is None else self.max_bytes - self.table.row_bytes
        return np.asarray(nbytes <= most)

    def load(self, serial: int) -> Group:
        """A fresh copy of payload that is on this process."""
        return unpack(self.read(serial))

    def read(self, serial: int) -> Packed:
        """Payload that is on this process, as it is kept."""
        row = self.table.rows_of([serial])[0]
        held, kind = (None, None) if row == NONE else (self._payload[row], self._kind_of[row])
        if held is None or kind is None:
            raise KeyError(serial)
        return Packed(kind, held)

    def _warn_of_bytes(self, costs: Ints) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        mean = format_bytes(float(costs.mean()))
        warnings.warn(
            f"replay_max_bytes is reached with {len(costs) - 1} of replay_buffer_size={self.capacity} groups, and "
            f"evicts from now on. A group costs {mean} on average.",
            stacklevel=2,
        )

    def held(self) -> list[int]:
        """Serials of the entries whose payload is on this process, in the order of the table."""
        serials = self.table.serial.tolist()
        return [serial for serial, held in zip(serials, self._payload, strict=True) if held is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, payload apart: copies of the table's `columns`, and `keysets`, sets of
        batch keys that its column `keys` counts in."""
        columns = {name: getattr(self.table, name).copy() for name in self.table.names}
        return {"columns": columns, "keysets": list(self._keysets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave in the place of its own entries; the payload that belongs here follows by
        `receive`.

        Columns of plugins that are absent now are left out, and new plugins' columns get their fill.

        Raises:
            KeyError: One of the table's own columns is missing.
        """
        self.forget(np.arange(len(self)))
        columns = state["columns"]
        renumbered = [self.keyset(keys) for keys in state["keysets"]]
        numbers = np.array(renumbered, np.int64)
        known = {name: columns[name] for name in self.table.names if name in CORE or name in columns}
        known["keys"] = numbers[columns["keys"]]
        self._append(known, len(columns["serial"]))

    def _append(self, columns: Mapping[str, NDArray[Any]], count: int) -> None:
        self.table.append(columns, count)
        self._payload += [None] * count
        self._kind_of += [None] * count

    def payload(self) -> Iterator[tuple[int, Packed]]:
        """`(serial, packed group)` of those that are `held`."""
        return ((serial, self.read(serial)) for serial in self.held())

    def receive(self, payload: Mapping[int, Packed]) -> None:
        """Put away the payload that lives on this process, by serial, of entries that stand in the table."""
        rows = self.table.rows_of(list(payload)).tolist()
        for row, (kind, data) in zip(rows, payload.values(), strict=True):
            if row != NONE:
                self._bytes += len(data) - self._size_of(row)
                self._payload[row], self._kind_of[row] = data, self._kinds.setdefault(kind, kind)

    def _size_of(self, row: int) -> int:
        held = self._payload[row]
        return 0 if held is None else len(held)

    def withdraw(self, serials: Sequence[int]) -> int:
        """Take back entries whose payload will not come or has no place; return their number."""
        if not len(serials):
            return 0
        rows = self.table.rows_of(serials)
        return self.forget(np.unique(rows[rows >= 0]))

    def unrestorable(self, keys: frozenset[str]) -> dict[str, Bools]:
        """Return the entries that a batch with these keys can't take, by reason. `pixel_values` among the keys means
        that it can take groups with images; those without fit in any batch."""
        needed, kinds = keys - {PIXELS}, [*enumerate(self._keysets)]
        unfit = {
            "lacks a tensor": [number for number, have in kinds if not needed <= have],
            "has images, the batch none": [number for number, have in kinds if PIXELS in have - keys],
        }
        return {reason: np.isin(self.table.keys, numbers) for reason, numbers in unfit.items()}

    def forget(self, rows: Sequence[int] | Ints) -> int:
        """Drop the entries in these rows; return their number."""
        index = np.asarray(rows, dtype=np.int64)
        if len(index) == 0:
            return 0
        for row in index.tolist():
            self._bytes -= self._size_of(row)
        for gap, row in self.table.remove(index):
            self._payload[gap], self._kind_of[gap] = self._payload[row], self._kind_of[row]
        del self._payload[len(self) :], self._kind_of[len(self) :]
        if len(self._kinds) > 2 * len(self) + FEW_KINDS:  # as with images, of which each has a size of its own
            self._kinds = {kind: kind for kind in self._kind_of if kind is not None}
        return len(index)


SOLVED = "its prompt is solved (replay_retire_passes)"
NOT_FINITE = "a trainable token has no finite log-prob: its file or the loss gave none"
TOO_LARGE = f"its reward is larger than {LARGEST_ADVANTAGE:g}, which no gradient of float32 bears"
OTHER_RULE = "another reward rule scored it"
MANY_RULES = 3
RULE_CHANGED = "Another reward rule than the present one scored the groups in the replay buffer, and they leave"
SCHEDULED = (
    f" This was change number {MANY_RULES}. Where the rule changes with every batch, as a schedule of weights does, "
    "nothing can be replayed: change it in few steps."
)
NO_PROMPTS: Ints = np.empty(0, np.int64)


class Newcomer(NamedTuple):
    """What the buffer is told of a group that it is offered, beside its numbers."""

    serial: int
    """Its serial number."""
    nbytes: int = 0
    """Bytes of its payload, on all processes."""
    keys: frozenset[str] = frozenset()
    """Batch keys that it can restore."""
    owner: int = 0
    """The rank that holds its payload, if that is known by now."""
    payload: Packed | None = None
    """The payload, if it is here; the rest follows by `receive`."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Entries drawn for some slots.

    Attributes:
        rows (`(m, k)`): Of each slot, rows of `table`; -1 for none.
        table ([`Table`]): The eligible entries alone.
        eligible (`(n,)`): Their rows in the buffer's table.
        chances (`(n,)`): How likely each of them was drawn first, relative to the least likely one; 1 where no
            correction asks.
    """

    rows: Ints
    table: Table
    eligible: Ints
    chances: Floats

    @property
    def some(self) -> Bools:
        """Tell for which slots anything was drawn, `(m,)`."""
        return np.asarray((self.rows != NONE).any(axis=1))


class ReplayBuffer:
    """Groups to train on again: `extend` stores, `sample` draws, and a session does both. It knows no trainer, batch,
    or other process; processes that share it all do the same to it.

    Attributes:
        policy ([`Policy`]): Strategies and limits.
        clock ([`Clock`]): Counts updates.
        generators ([`Generators`]): What is drawn from.
        totals ([`Totals`]): Counters and metrics, which strategies may read.
        prompts ([`PromptTable`], *optional*): The prompts generated for so far, which strategies may read.
        serial (`int`): The next group's serial number.
        rule ([`RewardRule`]): The reward rule that scored its entries.
        scored_from (`int`): The first serial number of a group that this rule has scored.
        warmed (`bool`): Whether it was filled from `replay_warm_start`.

    Args:
        capacity (`int`): Groups (not rows, not tokens) that it keeps.
        policy ([`Policy`], *optional*): Those of the default strategies, if not given.
        max_bytes (`int`, *optional*): Most bytes of payload and table rows.
        size (`int`): Rows of a group.
        rule ([`RewardRule`], *optional*): The reward rule that scores its groups; of one function, if not given.
        seed (`int`): Of its generators.
    """

    def __init__(
        self,
        capacity: int,
        policy: Policy | None = None,
        max_bytes: int | None = None,
        size: int = 8,
        rule: RewardRule | None = None,
        seed: int = 0,
        prompts: PromptTable | None = None,
    ) -> None:
        self.policy = policy or Policy.of()
        self.clock = Clock()
        self.generators = Generators(seed)
        self.totals = Totals()
        self.prompts = prompts
        self.serial, self.warmed = 0, False
        self.scored_from = 0
        self._rules = 0
        self.ended: Counter[str] = Counter()
        """Entries that a limit has ended since this process began, by the limit."""
        self.size = size
        self._store = Store(capacity, max_bytes, size)
        self._score_by(rule or RewardRule.plain())

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[int]:
        """Serial numbers of the entries, in the order of the table."""
        return iter(self.table.serial.tolist())

    def __contains__(self, serial: object) -> bool:
        if not isinstance(serial, int | np.integer):
            return False
        row = self.table.rows_of([int(serial)])[0]
        return bool(row >= 0)

    @property
    def table(self) -> Table:
        """The metadata columns."""
        return self._store.table

    @property
    def capacity(self) -> int:
        """Groups that it keeps."""
        return self._store.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, and the used rows of all columns."""
        return self._store.nbytes

    def resize(self, capacity: int, max_bytes: int | None, seed: int) -> None:
        """Give it another room, and begin its generators anew."""
        self._store.capacity, self._store.max_bytes = capacity, max_bytes
        self.generators = Generators(seed)

    def clear(self) -> None:
        """Forget every entry, and what a success was seen to be. Groups noted but not yet settled are still stored
        later."""
        self.policy.success.begin_anew(self.policy.success.of)
        self._store.forget(np.arange(len(self)))

    def score_by(self, rule: RewardRule, changes: Sequence[str], tells: bool = True) -> int:
        """Groups are scored by another rule from now on: those stored leave, those numbered before are refused, and
        what a success is has to be seen anew. Return how many left, by `OTHER_RULE`.

        Args:
            rule ([`RewardRule`]): The trainer's, on this process.
            changes (`Sequence[str]`): What is different on the first of the processes that decide together, in words;
                if nothing is, nothing leaves.
            tells (`bool`): Whether this process warns.

        Raises:
            ConfigurationError: It has no function of the name `replay_reward`.
        """
        if not changes:
            self.rule = rule
            return 0
        left = len(self)
        self.clear()
        self._score_by(rule)
        if not self.serial:
            return left
        self.scored_from = self.serial
        self._rules += 1
        if tells and self._rules in (1, MANY_RULES):
            told = "; ".join(changes)
            many = SCHEDULED if self._rules == MANY_RULES else ""
            warnings.warn(f"{RULE_CHANGED} ({told}). session.add(...) adds a file's again.{many}", stacklevel=2)
        return left

    def _score_by(self, rule: RewardRule) -> None:
        self.table.score_by(rule, self.policy.reward)
        self.policy.success.begin_anew(rule.in_words(self.policy.reward))
        self.rule = rule

    def take_serials(self, count: int) -> range:
        """Take serial numbers for `count` groups, which no other group gets."""
        first = self.serial
        self.serial += count
        return range(first, self.serial)

    def context(self, slots: Groups | None = None, local: bool = False) -> Context:
        """Return what strategies may know now; a sampler or mixer also of the `slots` that may be filled.

        Args:
            slots ([`Groups`], *optional*): These.
            local (`bool`): Whether this process draws from a generator of its own, as often as its rows need.
        """
        return Context(
            update=self.clock.update,
            rng=self.generators.local if local else self.generators.shared,
            capacity=self.capacity,
            num_generations=self.size,
            table=self.table,
            metrics=self.totals.metrics,
            slots=slots,
            prompts=self.prompts,
            noted=self.totals.reasons,
        )

    def observe(self, generated: Sequence[Groups], tally: Tally) -> Ints:
        """Take note of how generated groups went; return the prompts that are solved, whose entries leave. So do
        those that no limit will ever let through again."""
        policy, table = self.policy, self.table
        for new_groups in generated:
            passed = policy.success.passed(new_groups)
            policy.limiter.observe(new_groups, passed, known=policy.success.least is not None)
            tally.judge(new_groups, passed, policy.success)
        prompts = self.solved_prompts(generated)
        if len(prompts):
            left = self._store.forget(np.flatnonzero(np.isin(table.prompt, prompts)))
            tally.retire(left, "its prompt was solved (replay_retire_passes)")
        spent = self._spent()
        self.ended.update({limit: int(entries.sum()) for limit, entries in spent.items()})
        if spent:  # not counted: these limits are the entries' ordinary end
            self._store.forget(np.flatnonzero(np.logical_or.reduce([*spent.values()])))
        return prompts

    def solved(self, groups: Groups) -> Bools:
        """Tell which groups solve their prompt: enough of their rows pass."""
        needed = self.policy.retire_passes
        if needed is None:
            return np.zeros(len(groups), bool)
        return np.asarray(self.policy.success.passed(groups).sum(axis=1) >= needed)

    def solved_prompts(self, generated: Sequence[Groups]) -> Ints:
        """Return the prompts that some of these groups solve."""
        return np.concatenate([NO_PROMPTS, *(groups.prompt[self.solved(groups)] for groups in generated)])

    def extend(
        self,
        groups: Groups,
        newcomers: Sequence[Newcomer] | None = None,
        tally: Tally | None = None,
        solved: Ints = NO_PROMPTS,
    ) -> set[int]:
        """Offer groups; over capacity the lowest keep ranks leave, of equal ranks the older. These are the rules of
        all that enters, wherever it comes from.

        Args:
            groups ([`Groups`]): With their behavior log-probs.
            newcomers (`Sequence[Newcomer]`, *optional*): One a group; groups without payload, if not given.
            tally ([`Tally`], *optional*): Counts what is refused, stored, and evicted.
            solved (`(n,)`, *optional*): Prompts whose groups are refused.

        Returns:
            The serials of those that stayed. Payload that did not come with them is due by `receive`.

        Raises:
            ReplayError: A serial comes twice, or belongs to an entry.
        """
        tally = Tally() if tally is None else tally
        if newcomers is None:
            newcomers = [Newcomer(serial) for serial in self.take_serials(len(groups))]
        policy, hooks, store = self.policy, self.policy.hooks, self._store
        groups = _with_failed_masked(groups)
        serials = np.array([newcomer.serial for newcomer in newcomers], np.int64)
        if len({*serials.tolist()}) < len(serials) or (self.table.rows_of(serials) != NONE).any():
            raise ReplayError(
                f"Groups were offered with the serials {serials.tolist()}, of which one comes twice or belongs to an "
                "entry: take new ones from take_serials()."
            )
        refused: dict[str, Bools] = {
            OTHER_RULE: serials < self.scored_from,
            "it has no trainable token": np.asarray(~groups.trains.any(axis=1)),
            NOT_FINITE: np.asarray(~np.isfinite(_logps(groups)).all(axis=1)),
            TOO_LARGE: np.asarray((np.abs(groups.total) > LARGEST_ADVANTAGE).any(axis=1)),
            SOLVED: np.isin(groups.prompt, solved) if len(solved) else np.zeros(len(groups), bool),
        }
        due = _left(len(groups), refused, tally)
        if not len(due):
            return set()
        groups, newcomers = _taken(groups, newcomers, due)
        context = self.context()
        score = hooks.score(groups, context)
        nbytes = np.array([newcomer.nbytes for newcomer in newcomers], np.int64)
        refused = {
            f"the scorer {hooks.label('scorer')} stores none like it (NaN)": np.isnan(score),
            "its score is infinite": np.isinf(score),
            "it alone is larger than replay_max_bytes": ~store.fits(nbytes),
        }
        due = _left(len(groups), refused, tally)
        groups, newcomers = _taken(groups, newcomers, due)
        serials = np.array([newcomer.serial for newcomer in newcomers], np.int64)
        told = {
            "serial": serials,
            "score": score[due],
            "nbytes": nbytes[due],
            "keys": np.array([store.keyset(newcomer.keys) for newcomer in newcomers], np.int64),
            "owner": np.array([newcomer.owner for newcomer in newcomers], np.int64),
        }
        rows = store.append({**told, **_columns(groups)}, context.rng)
        try:
            hooks.admitted(self.table, rows, groups, context)
            left = self.trim()
        except Exception:
            store.forget(self.table.rows_of(serials))
            raise
        there = self.table.rows_of(serials) >= 0
        stayed = {newcomer.serial: newcomer.payload for newcomer in itertools.compress(newcomers, there)}
        outranked = len(newcomers) - len(stayed)
        tally.stored = len(stayed)
        tally.evicted = left - outranked
        tally.note(
            outranked, f"the buffer was full, and the evictor {hooks.label('evictor')} ranked a new group lowest"
        )
        policy.limiter.inserted += len(stayed)
        self.receive({serial: payload for serial, payload in stayed.items() if payload is not None})
        return set(stayed)

    def trim(self) -> int:
        """Evict what there is no room for; return its number."""
        return self._store.evict(lambda table: self.policy.hooks.rank(table, self.context()), self.policy.drops)

    def allowed(self, groups: int) -> tuple[int, str]:
        """Return how many of a batch's `groups` replay may fill, and which limit says so."""
        return self.policy.limiter.slots_allowed(groups, self.capacity, self.clock)

    def sample(
        self,
        slots: Groups | None = None,
        tally: Tally | None = None,
        keys: frozenset[str] = frozenset(),
        held: Mapping[str, Bools] | None = None,
        wanted: int | None = None,
    ) -> Drawn | None:
        """Draw entries for slots, never one twice.

        Args:
            slots ([`Groups`], *optional*): The fresh groups whose places they may take, in the selector's order; one
                entry that takes no group's place, if not given.
            tally ([`Tally`], *optional*): Counts what keeps entries from being drawn.
            keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
            held (`Mapping[str, Bools]`, *optional*): Entries that can't be replayed, by reason, beside those that
                plugins name.
            wanted (`int`, *optional*): So many slots will be filled; all, if not given.

        Returns:
            What was drawn; None if nothing was.
        """
        tally = Tally() if tally is None else tally
        if not len(self):
            tally.note(1, self._shortage([]))
            return None
        hooks, context = self.policy.hooks, self.context(slots)
        eligible, reasons = self._eligible(keys, hooks.eligible(self.table, self.context()) | dict(held or {}))
        count = 1 if slots is None else len(slots)
        wanted = count if wanted is None else wanted
        self._note_caps(count, wanted, len(eligible), tally)
        if not len(eligible):
            tally.note(1, self._shortage(reasons))
            return None
        table = self.table.take(eligible) if len(eligible) < len(self) else self.table
        rows = hooks.sample(table, count, context)
        if len(rows) < wanted:
            tally.note(1, self._shortage(reasons))
        some = (rows != NONE).any(axis=1)
        empty = np.flatnonzero(~some)[: max(min(len(some), wanted) - int(some.sum()), 0)]
        self._note_empty(empty if slots is None else slots.prompt[empty], table, tally)
        return Drawn(rows, table, eligible, self._chances(table)) if some.any() else None

    def count_uses(self, rows: Ints, tally: Tally) -> None:
        """Count that these rows of the table are replayed."""
        self.policy.limiter.drawn += len(rows)
        self.table.writable("uses")[rows] += 1
        tally.replay(self.table, rows, self.clock.update)

    def _eligible(self, keys: frozenset[str], held: Mapping[str, Bools]) -> tuple[Ints, list[str]]:
        """Rows of the table that may be replayed now, and the reasons that hold others back. An entry is replayed
        only after one update since its generation."""
        too_new = {"too new": self.table.update >= self.clock.update}
        excluded = too_new | self._spent() | self._store.unrestorable(keys) | dict(held)
        reasons = [reason for reason, entries in excluded.items() if entries.any()]
        eligible = np.ones(len(self), bool)
        for reason in reasons:
            eligible &= ~excluded[reason]
        return np.flatnonzero(eligible), reasons

    def _spent(self) -> dict[str, Bools]:
        """The entries that a limit excludes forever, by its name."""
        policy, table = self.policy, self.table
        excluded = {}
        if policy.max_age is not None:
            excluded["replay_max_age"] = self.clock.update - table.update > policy.max_age
        if policy.max_uses is not None:
            excluded["replay_max_uses"] = table.uses >= policy.max_uses
        return excluded

    def _note_caps(self, slots: int, wanted: int, eligible: int, tally: Tally) -> None:
        """Count the slots that a limit left, and that eligible entries, or those that it ended, could have filled."""
        tally.note(min(slots, eligible) - min(wanted, eligible), f"replay_max_fraction{HELD_BACK}")
        room = self.capacity - len(self)
        if self.ended and room > 0:
            limit, count = self.ended.most_common(1)[0]
            tally.note(min(max(wanted - eligible, 0), count, room), f"{limit}{HELD_BACK}")

    def _note_empty(self, prompts: Ints, table: Table, tally: Tally) -> None:
        """Count the slots, of these prompts, for which the sampler drew nothing."""
        if not self.policy.draws_same_prompt:
            tally.note(len(prompts), f"the sampler {self.policy.hooks.label('sampler')} drew nothing for a slot")
            return
        stored = int(np.isin(prompts, table.prompt).sum())
        tally.note(stored, "a slot's prompt has no further group: each is replayed once a batch")
        tally.note(len(prompts) - stored, "no group of a slot's prompt can be replayed")

    def _shortage(self, held_back: Sequence[str]) -> str:
        """Describe why fewer entries were drawn than there were slots."""
        if not len(self):
            never = "" if self.policy.limiter.inserted else ": no live group has been stored yet"
            return f"the buffer was empty{never}"
        told = f" (held back: {', '.join(sorted(held_back))})" if held_back else ""
        return f"the buffer held fewer eligible groups than slots{told}"

    def _chances(self, table: Table) -> Floats:
        """How likely each eligible entry is drawn first, relative to the least likely one; 1 where no correction
        asks."""
        if self.policy.weigh is None:
            return np.ones(len(table))
        weights = np.asarray(self.policy.weigh(table, self.context()), np.float64)
        least = weights.min(initial=np.inf)
        if not 0 < least < np.inf:
            usable = weights[np.isfinite(weights) & (weights > 0)]
            least = usable.min(initial=np.inf)
        relative = weights / least
        relative[~np.isfinite(relative)] = 1.0  # entries without weight are drawn when no others are left
        return np.asarray(np.maximum(relative, 1.0))

    def held(self) -> list[int]:
        """Serials of the entries whose payload is on this process, in the order of the table."""
        return self._store.held()

    def load(self, serial: int) -> Group:
        """A fresh copy of payload that is on this process."""
        return self._store.load(serial)

    def payload(self) -> Iterator[tuple[int, Packed]]:
        """`(serial, packed group)` of those that are `held`."""
        return self._store.payload()

    def receive(self, payload: Mapping[int, Packed]) -> None:
        """Put away the payload that lives on this process, by serial."""
        self._store.receive(payload)

    def withdraw(self, serials: Sequence[int]) -> int:
        """Take back entries whose payload will not come or has no place; return their number."""
        return self._store.withdraw(serials)

    def forget(self, entries: Bools) -> int:
        """Drop these entries, `(len(self),)`; return their number."""
        return self._store.forget(np.flatnonzero(entries))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, payload apart: the table's `columns`, `keysets`, which its column `keys`
        counts in, and what else JSON can hold."""
        return {
            **self._store.state_dict(),
            "update": self.clock.update,
            "serial": self.serial,
            "warmed": self.warmed,
            "generators": self.generators.state_dict(),
            "reward_rule": self.rule,
            "strategies": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], own: bool = True, shared: bool = True) -> None:
        """Take what `state_dict` gave; the payload that belongs here follows by `receive`.

        Args:
            state (`Mapping`): As read.
            own (`bool`): Whether to take the generator of this process.
            shared (`bool`): Whether to take that of all processes that share the buffer.
        """
        self.clock.update, self.serial, self.warmed = state["update"], state["serial"], state["warmed"]
        self.generators.load_state_dict(state["generators"], shared=shared, local=own)
        self.rule, self.scored_from = RewardRule.of(state["reward_rule"]), 0
        self.policy.load_state_dict(state["strategies"])
        self._store.load_state_dict(state)


def _with_failed_masked(groups: Groups) -> Groups:
    """The groups with rows masked that failed, where some row of their group has a reward."""
    failed = groups.failed
    if not failed.any():
        return groups
    return replace(groups, masked=groups.masked | (failed & ~failed.all(axis=1, keepdims=True)))


def _taken(groups: Groups, newcomers: Sequence[Newcomer], due: Ints) -> tuple[Groups, Sequence[Newcomer]]:
    """Return the groups and newcomers of the rows `due`."""
    return groups.take(due), [newcomers[row] for row in due]


def _left(count: int, refused: Mapping[str, Bools], tally: Tally) -> Ints:
    """Rows that no reason refuses; the others are counted by their first one."""
    left = np.ones(count, bool)
    for reason, rows in refused.items():
        tally.refuse(int((left & rows).sum()), reason)
        left &= ~rows
    return np.flatnonzero(left)


def _logps(groups: Groups) -> Floats:
    """The groups' summed log-probs, `(n, G)`: NaN where they are not known."""
    logps = groups.behavior_logps
    return np.full(groups.advantages.shape, np.nan) if logps is None else logps


def _columns(groups: Groups) -> dict[str, NDArray[Any]]:
    """What the table has of groups' numbers."""
    logps = _logps(groups)
    return {
        "update": groups.update,
        "reward_mean": groups.reward_mean,
        "reward_std": groups.reward_std,
        "tokens": groups.trainable.sum(axis=1),
        "items": groups.counted.sum(axis=1),
        "prompt": groups.prompt,
        "origin": groups.origin,
        "row_rewards": groups.rewards,
        "row_advantage": groups.advantages,
        "row_logp": np.where(groups.trainable > 0, logps / np.maximum(groups.trainable, 1), np.nan),
        "row_length": groups.lengths,
        "row_items": groups.items,
        "row_masked": groups.masked,
    }
