"""One rank of many, alone in a process: what it decides and receives in a step, the columns of all ranks made up.

What a rank does between `share` and composing its batch it does from columns that all ranks have, so that one process
can do it for any number of ranks: shape, settle, select, sample, mix, `agree`, and the planning of `admit` and
`fetch`. All of that is the package's own code. Made up is what other ranks would have sent: columns, counters and, of
payload, the number of bytes.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from patterns import SETUP, Pattern

from trl_replay import Group, ReplayConfig, compat
from trl_replay.assembly import room_in
from trl_replay.batch.compose import cut, join
from trl_replay.batch.group_view import AdvantageRule, blank, describe, rewards_of_batch, view
from trl_replay.buffer.candidates import PendingGroups, StepCarry, with_rewards
from trl_replay.buffer.rate_limiter import RateLimiter
from trl_replay.buffer.replay_buffer import ReplayBuffer
from trl_replay.components import Components
from trl_replay.counters import COUNTERS, Tally
from trl_replay.distributed.communicator import Communicator
from trl_replay.distributed.row_layout import RowLayout
from trl_replay.fields import FieldTable
from trl_replay.hooks import SessionHooks
from trl_replay.loss.bounds import Bounds
from trl_replay.loss.gates import Gates
from trl_replay.loss.handshake import Handshake
from trl_replay.serialization.wire import packed_size
from trl_replay.settings import resolve
from trl_replay.step.decisions import Decisions
from trl_replay.step.stages import BatchDecision, FreshBatch
from trl_replay.step.training_batch import collect
from trl_replay.strategies.scopes import Collectives, GatheredScope, ProcessScope, ShardedScope
from trl_replay.tasks import Tasks
from trl_replay.types import Context, Groups

SCOPES = {"process": ProcessScope, "gathered": GatheredScope, "sharded": ShardedScope}
KINDS = ("scorer", "evictor", "sampler", "selector", "mixer")
FIELDS = FieldTable(0)
NOTHING = np.empty(0, np.int64)
PAYLOAD = Group({}, frozenset({"made up"}), NOTHING, NOTHING)
"""Stands for any group's payload."""


@dataclass(frozen=True)
class Generation:
    """The completions of all ranks for one batch, as far as decisions and traffic are concerned.

    Attributes:
        described: The columns of `describe`, of all rows.
        scored: `(rows, 1)` rewards.
        part_bytes: `(rows,)` packed bytes of each rank's part of a live group, at its first row there.
        group_bytes: `(groups,)` packed bytes of each live group.
        tensor_bytes: `(groups,)` of these, the tensors' alone.
    """

    described: dict[str, np.ndarray]
    scored: torch.Tensor
    part_bytes: np.ndarray
    group_bytes: np.ndarray
    tensor_bytes: np.ndarray


class Played:
    """Generations of a pattern that real ranks play too, from the very batches."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.ranks, self.rows, self.size = pattern.ranks, pattern.rows, pattern.size

    def generation(self, update: int) -> Generation:
        """Everything is described, cut and packed as on the ranks."""
        pattern = self.pattern
        batches = [pattern.batch(update, rank) for rank in range(self.ranks)]
        described = [self._described(batch, update, rank) for rank, batch in enumerate(batches)]
        rows = self.ranks * self.rows
        part_bytes = np.zeros(rows, np.int64)
        group_bytes, tensor_bytes = np.zeros((2, rows // self.size), np.int64)
        for slot in np.flatnonzero(pattern.live_groups(update)).tolist():
            parts = self._parts(batches, slot)
            for first, part in parts:
                part_bytes[first] = packed_size(part)
            whole = join([part for _, part in parts], FIELDS)
            group_bytes[slot] = packed_size(whole)
            tensor_bytes[slot] = sum(tensor.nbytes for tensor in whole.tensors.values())
        return Generation(
            {name: np.concatenate([each[name] for each in described]) for name in described[0]},
            pattern.scored(update),
            part_bytes,
            group_bytes,
            tensor_bytes,
        )

    def _described(self, batch: Any, update: int, rank: int) -> dict[str, np.ndarray]:
        first = rank * self.rows
        tasks = Tasks()
        tasks.begin(self.pattern.inputs(update, rank), first, self.size)
        return describe(batch, first, tasks.of_rows, FIELDS)

    def _parts(self, batches: Sequence[Any], slot: int) -> list[tuple[int, Group]]:
        """The parts of a group, each with its first row among those of all ranks."""
        found = []
        begin, end = slot * self.size, (slot + 1) * self.size
        for rank in range(begin // self.rows, (end - 1) // self.rows + 1):
            first = max(begin, rank * self.rows)
            here = slice(first - rank * self.rows, min(end - rank * self.rows, self.rows))
            (group,) = cut(batches[rank], FIELDS, [here])
            found.append((first, with_rewards(group, np.zeros((self.size, 1)))))
        return found

    def batch(self, update: int, rank: int) -> dict[str, torch.Tensor]:
        """This rank's own."""
        return self.pattern.batch(update, rank)


class MadeUp:
    """Generations of many ranks, by distributions; groups are whole on their ranks.

    Args:
        ranks: Processes.
        groups: Of a batch, on each.
        size: Rows of a group.
        live: Share of live groups.
        tokens: Mean tokens of a completion; lengths are uniform between half and one and a half of it.
        prompt_tokens: Of every prompt. There are four prompts for each group of a batch.
    """

    def __init__(self, ranks: int, groups: int, size: int, live: float, tokens: int, prompt_tokens: int) -> None:
        self.ranks, self.rows, self.size = ranks, groups * size, size
        self.live, self.tokens, self.prompt_tokens = live, tokens, prompt_tokens

    @cached_property
    def keys(self) -> frozenset[str]:
        """Of a stored group."""
        return FIELDS.stored_keys(self.batch(0, 0))

    def generation(self, update: int) -> Generation:
        """Drawn anew for each update."""
        random = np.random.default_rng([5, update])
        rows = self.ranks * self.rows
        groups = rows // self.size
        live = random.random(groups) < self.live
        passes = random.integers(1, self.size, groups) * live
        rewards = (np.arange(self.size) < passes[:, None]).astype(np.float32).ravel()
        scored = torch.from_numpy(rewards)[:, None]
        lengths = random.integers(self.tokens // 2, self.tokens * 3 // 2 + 1, rows)
        prompts = np.zeros(rows, np.int64)
        prompts[:] = np.repeat(1 + random.integers(0, 4 * groups, groups), self.size)
        described = {
            "row": np.arange(rows),
            "advantages": compat.advantages(scored, SETUP, self.size).double().numpy(),
            "lengths": lengths,
            "trainable": lengths,
            "items": lengths,
            "images": np.full(rows, -1),
            "prompt": prompts,
        }
        part_bytes = np.zeros(rows, np.int64)
        group_bytes, tensor_bytes = np.zeros((2, groups), np.int64)
        by_group = lengths.reshape(groups, self.size)
        for slot in np.flatnonzero(live).tolist():
            group = self._group(by_group[slot])
            group_bytes[slot] = part_bytes[slot * self.size] = packed_size(group)
            tensor_bytes[slot] = sum(tensor.nbytes for tensor in group.tensors.values())
        return Generation(described, scored, part_bytes, group_bytes, tensor_bytes)

    def _group(self, lengths: np.ndarray) -> Group:
        """A stored group of these lengths, with the tensors that a cut one has."""
        tokens = int(lengths.sum())
        tensors = {
            "prompt_ids": torch.empty(self.prompt_tokens, dtype=torch.int32),
            "completion_ids": torch.empty(tokens, dtype=torch.int32),
            "advantages": torch.empty(self.size),
            compat.OLD_LOGPS: torch.empty(tokens),
        }
        group = Group(tensors, self.keys, np.array([self.prompt_tokens]), lengths)
        return with_rewards(group, np.zeros((self.size, 1)))

    def batch(self, update: int, rank: int) -> dict[str, torch.Tensor]:
        """This rank's own, with completions of one token: payload is not looked at."""
        ones = torch.ones(self.rows, 1, dtype=torch.int64)
        return {
            "prompt_ids": ones,
            "prompt_mask": ones,
            "completion_ids": ones,
            "completion_mask": ones,
            "old_per_token_logps": torch.zeros(self.rows, 1),
            "advantages": torch.zeros(self.rows),
            "num_items_in_batch": torch.tensor(self.rows),
        }


class Size(NamedTuple):
    """Bytes of a group."""

    packed: int
    tensors: int


class Others(Collectives):
    """The bytes that a rank would get from the others."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.columns: dict[str, np.ndarray] = {}
        self.coming = 0

    def all_gather(self, verb: str, mine: np.ndarray) -> np.ndarray:
        """Of `share` the columns of all; in `agree` the others decided the same, and count nothing twice."""
        if verb == "share":
            by_rank = [column.reshape(self.ranks, 1, -1).view(np.uint8) for column in self.columns.values()]
            gathered = np.concatenate(by_rank, axis=1).reshape(self.ranks, -1)
        else:
            said = np.tile(mine.view(np.float64), (self.ranks, 1))
            others = np.arange(self.ranks) != self.rank
            said[others, : len(COUNTERS)] = 0
            gathered = said.view(np.uint8)
        self.received[verb] += gathered.nbytes - mine.nbytes
        return gathered

    def exchange(self, verb: str, outgoing: Any, load: Any, incoming: Sequence[int] | None) -> list[Any]:
        """Bytes only."""
        if incoming is None:
            self.received[verb] += 8 * (self.ranks - 1) + self.coming
        else:
            self.received[verb] += sum(incoming) - incoming[self.rank]
        return [Endless() for _ in range(self.ranks)]


class Endless:
    """Groups as many as are taken."""

    def pop(self, place: int) -> Group:
        """The next one."""
        return PAYLOAD


class Mine(dict[int, Group]):
    """This rank's rows of admitted groups, all of them."""

    def __missing__(self, serial: int) -> Group:
        return PAYLOAD


class SimulatedRank:
    """A rank whose others are made up.

    Args:
        source: What all generate: [`Played`] or [`MadeUp`].
        rank: Which of them it is.
        settings: Of replay.

    Attributes:
        received: Bytes by verb, as a scope counts them.
        seconds: CPU time of each part, by step.
        moved: Bytes of payload that came to a rank so far, on average over all ranks.
        bound: Of these the tensors' that had to come: admitted or drawn elsewhere.
    """

    def __init__(self, source: Any, rank: int, **settings: Any) -> None:
        self.source, self.rank = source, rank
        self.settings = chosen = resolve(ReplayConfig(**settings))
        ranks, size = source.ranks, source.size
        accelerator = SimpleNamespace(process_index=rank, num_processes=ranks, device="cpu")
        self.scope = SCOPES[chosen.label("scope")](accelerator)
        self.others = self.scope._collectives = Others(accelerator)
        trainer = SimpleNamespace(accelerator=accelerator)
        capacity = room_in(trainer, chosen, self.scope).groups
        self.buffer = ReplayBuffer(capacity, chosen.limits, size=size)
        self.components = Components(
            buffer=self.buffer,
            scope=self.scope,
            hooks=SessionHooks([], chosen.strategies, {kind: chosen.strategies[kind].make() for kind in KINDS}),
            fields=FIELDS,
            tasks=Tasks(),
            rng=np.random.default_rng(chosen.seed),
            rate_limiter=RateLimiter(chosen.rate_limits, capacity),
            gates=Gates(),
            bounds=Bounds(),
            num_generations=size,
            token_weights=True,
            forward=False,
            processes=ranks,
        )
        self.clock = self.components.clock
        handshake = Handshake(forward=False)
        handshake.verified = True
        self.decide = Decisions(self.components, handshake, self._context, chosen)
        self.communicator = Communicator(self.components, rank)
        self.carry = StepCarry()
        self.sizes: dict[int, Size] = {}
        self.last = np.zeros(ranks * source.rows, np.int64)
        self.seconds: list[Counter[str]] = []
        self.moved = 0.0
        self.bound = 0.0

    @property
    def received(self) -> dict[str, int]:
        """Bytes by verb so far."""
        return dict(self.scope.received)

    def _context(self, slots: Groups | None = None) -> Context:
        return Context(
            update=self.clock.update,
            rng=self.components.rng,
            capacity=self.buffer.capacity,
            num_generations=self.source.size,
            table=self.buffer.table,
            slots=slots,
        )

    def fill(self) -> None:
        """Fills the buffer from earlier generations, whose live groups all ranks offered; not timed."""
        source = self.source
        while len(self.buffer) < self.buffer.capacity:
            generation = source.generation(self.clock.update)
            fresh = view(generation.described, generation.scored, SETUP, source.size, self.clock.update)
            live = np.flatnonzero(~fresh.dead)
            serials = range(self.carry.serial, self.carry.serial + len(live))
            keys = FIELDS.stored_keys(source.batch(0, 0))
            stored = self.decide.offer(
                fresh.take(live, np.zeros((len(live), source.size))),
                serials,
                (generation.group_bytes[live]).tolist(),
                [keys] * len(live),
                Tally(),
            )
            born = live * source.size // source.rows
            self._keep_sizes(serials.start, live, generation)
            owners = self.buffer.table.writable("owner")
            newcomers = self.buffer.table.serial >= serials.start
            owners[newcomers] = born[self.buffer.table.serial[newcomers] - serials.start]
            replicated = self.settings.label("scope") == "gathered"
            mine = [serial for serial, rank in zip(serials, born, strict=True) if replicated or rank == self.rank]
            self.buffer.receive({serial: PAYLOAD for serial in mine if serial in stored})
            self.carry.serial = serials.stop
            self.clock.update += 1

    def step(self) -> BatchDecision:
        """The work of `Session.step` on columns, in its order."""
        source, components, update = self.source, self.components, self.clock.update
        generation = source.generation(update)
        pending = self.carry.take()
        self.others.columns = self._columns(generation)
        first = self.rank * source.rows
        local = {name: column[first : first + source.rows] for name, column in self.others.columns.items()}
        batch = source.batch(update, self.rank)
        tally = Tally()
        self.seconds.append(Counter())
        with self._timed("share"):
            rows = RowLayout(self.scope.share(local), local, source.size)
        with self._timed("look"):
            rewards = rewards_of_batch([generation.scored], rows.columns, SETUP, source.size, len(generation.scored))
            rows.check(len(rewards), source.ranks)
            groups = self.decide.shape_advantages(view(rows.columns, rewards, SETUP, source.size, update))
        with self._timed("settle"):
            admitted = self.decide.settle(pending, rows, [groups], tally)
        with self._timed("fill"):
            rule = AdvantageRule(rows.columns, rewards, SETUP, source.size)
            fresh = FreshBatch(rows, groups, rule, rows.takes(FIELDS.stored_keys(batch)), known=True)
            decision = self.decide.fill_batch(fresh, admitted, self.carry.collected_at, tally)
        with self._timed("agree"):
            self.communicator.agree(rows, lambda: decision)
        with self._timed("admit"):
            parts = self.scope.admit(self.buffer.table, admitted.arrivals, Mine())
            self.buffer.receive(dict.fromkeys(parts, PAYLOAD))
        with self._timed("fetch"):
            requests = rows.requests(decision.sampled, self.buffer.table.owner)
        self._count(decision, requests)
        with self._timed("fetch"):
            payload = self.scope.fetch(requests, lambda serial: PAYLOAD)
        with self._timed("place"):
            rows.placements(decision.sampled, payload)
        serial = self.carry.serial
        with self._timed("collect"):
            candidates = collect(batch, decision, components, serial, update)
        self.carry.collected(PendingGroups(groups, candidates), update)
        self._keep_sizes(serial, (rows.columns["row"][:: rows.size] // rows.size)[decision.candidates], generation)
        self.last = generation.part_bytes
        self.clock.update += 1
        return decision

    def _keep_sizes(self, serial: int, slots: np.ndarray, generation: Generation) -> None:
        """Of groups with ascending serials, by their place among those of all ranks."""
        pairs = zip(generation.group_bytes[slots].tolist(), generation.tensor_bytes[slots].tolist(), strict=True)
        self.sizes.update((serial + number, Size(*pair)) for number, pair in enumerate(pairs))

    def _columns(self, generation: Generation) -> dict[str, np.ndarray]:
        """The columns of all rows, as all ranks together would share them."""
        count = len(generation.scored)
        columns = blank(0, count) | generation.described
        columns["recorded"] = np.ones(count, np.int64)
        columns["nbytes"] = self.last
        return {name: np.ascontiguousarray(columns[name]) for name in blank(0, 0)}

    def _count(self, decision: BatchDecision, requests: Sequence[Any]) -> None:
        """Bytes that admission and `fetch` bring to this rank, and to one on average: packed, and tensors alone."""
        ranks, scope = self.source.ranks, self.settings.label("scope")
        fetched = [
            (self.sizes[serial], owner, [rank for rank in needed if rank != owner])
            for serial, owner, needed in requests
        ]
        self.others.coming = sum(size.packed for size, _, needed in fetched if self.rank in needed)
        if scope == "gathered":
            arrivals = decision.admitted.arrivals
            self.moved += sum(int(each.sizes.sum()) for each in arrivals) * (ranks - 1) / ranks
            self.bound += sum(self.sizes[each.serial].tensors for each in arrivals) * (ranks - 1) / ranks
        elif scope == "sharded":
            table = self.buffer.table
            owners = dict(zip(table.serial.tolist(), table.owner.tolist(), strict=True))
            moved = [int(each.sizes.sum() - each.sizes[owners[each.serial]]) for each in decision.admitted.arrivals]
            self.moved += sum(moved) / ranks
            self.moved += sum(size.packed * len(needed) for size, _, needed in fetched) / ranks + 8 * (ranks - 1)
            self.bound += sum(size.tensors * len(needed) for size, _, needed in fetched) / ranks

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.seconds[-1][part] += time.process_time() - began
