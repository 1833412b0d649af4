"""Decisions without a trainer: over a buffer of made-up entries, with the registry's strategies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from buffers import Ledger

from trl_replay import ReplayConfig
from trl_replay.batch.group_view import blank
from trl_replay.buffer.rate_limiter import RateLimiter
from trl_replay.buffer.replay_buffer import ReplayBuffer
from trl_replay.decision import RowOutcome
from trl_replay.distributed.row_layout import RowLayout
from trl_replay.hooks import SessionHooks
from trl_replay.loss.handshake import Handshake
from trl_replay.loss.off_policy_stats import STATS
from trl_replay.progress import Clock
from trl_replay.settings import Settings, resolve
from trl_replay.step.decisions import Decisions
from trl_replay.step.stages import BatchDecision, FreshBatch
from trl_replay.testing import make_context
from trl_replay.types import Groups

SIZE = 4
"""Rows of a group."""
KINDS = ("scorer", "evictor", "sampler", "selector", "mixer")
NO_KEYS: frozenset[str] = frozenset()


def settings_of(**settings: Any) -> Settings:
    """What a session goes by with these settings of `ReplayConfig`."""
    return resolve(ReplayConfig(**{"replay_start": 0, **settings}))


class Deciding:
    """`Decisions` of a session that is at an update, and what they work on.

    `settings` are those of `ReplayConfig`; strategies may be functions. What the loss is said to have shown stands in
    `handshake`, and `weigh` gives the chances of being drawn.
    """

    def __init__(self, capacity: int = 50, update: int = 0, weigh: Any = None, **settings: Any) -> None:
        self.settings = settings_of(**settings)
        found = self.settings.strategies
        self.buffer = ReplayBuffer(capacity, Ledger(), self.settings.limits, size=SIZE)
        self.clock = Clock(update)
        self.handshake = Handshake(forward=False)
        self.handshake.verified = True
        self.rng = np.random.default_rng(0)
        components: Any = SimpleNamespace(
            buffer=self.buffer,
            hooks=SessionHooks([], found, {kind: found[kind].make() for kind in KINDS}),
            rate_limiter=RateLimiter(self.settings.rate_limits, capacity),
            weigh=weigh,
            mixes_rows=self.settings.label("mixer") != "whole",
            processes=1,
            clock=self.clock,
            forward=False,
        )
        self.rate_limiter = components.rate_limiter
        self.decide = Decisions(components, self.handshake, self.context, self.settings)

    def context(self, slots: Groups | None = None) -> Any:
        return make_context(self.buffer.table, update=self.clock.update, num_generations=SIZE, slots=slots)

    def store(self, scores: list[float], **columns: Any) -> None:
        """Entries with these scores, serials 0, 1, …, of which the buffer keeps what its capacity allows; their rows
        train 5 tokens each and have advantages."""
        count = len(scores)
        made = {
            "serial": np.arange(count),
            "score": np.asarray(scores, float),
            "update": np.zeros(count, np.int64),
            "row_advantage": np.ones((count, SIZE)),
            "row_logp": -np.ones((count, SIZE)),
            "row_items": np.full((count, SIZE), 5),
        }
        made |= {name: np.asarray(column) for name, column in columns.items()}
        keys = [self.buffer.keyset(NO_KEYS)] * count
        stored, _ = self.buffer.offer(
            {"prompt": np.arange(count), "keys": np.array(keys), **made}, lambda table: table.serial, self.rng
        )
        self.buffer.receive(dict.fromkeys(stored))
        for name in ("uses", "last_used"):
            if name in columns:
                self.buffer.table.writable(name)[:] = columns[name]

    @property
    def serials(self) -> list[int]:
        return sorted(self.buffer.table.serial.tolist())


def fresh_batch(
    groups: Groups, rows: RowLayout | None = None, keys: frozenset[str] = NO_KEYS, known: bool = False
) -> FreshBatch:
    """A batch of these groups, on one process, whose advantages nobody computes anew."""
    rule: Any = SimpleNamespace(takes_functions_apart=False, explains_batch=True)
    return FreshBatch(rows or layout(len(groups)), groups, rule, keys, known)


def decision(fresh: FreshBatch, **changed: Any) -> BatchDecision:
    """Nothing is done to the batch, but for what is given."""
    made = {"outcome": RowOutcome.of_fresh(fresh.groups), "copies": [], "candidates": [], **changed}
    return BatchDecision(fresh=fresh, **made)


def stats(groups: int, **columns: dict[int, list[float]]) -> dict[str, np.ndarray]:
    """The columns of `OffPolicyStats` over `groups` groups; given per name and slot, row by row, 0 elsewhere.

    Ratios that are not given are 1.
    """
    seen = columns.get("seen", {})
    columns = {"ratio": seen, "squares": seen, **columns}
    made = {name: np.zeros(groups * SIZE) for name in STATS}
    for name, slots in columns.items():
        for slot, values in slots.items():
            made[name][slot * SIZE : (slot + 1) * SIZE] = values
    return made


def layout(groups: int = 3, **columns: Any) -> RowLayout:
    """All rows on one process."""
    shared = blank(0, groups * SIZE) | stats(groups) | {name: np.asarray(given) for name, given in columns.items()}
    return RowLayout(shared, shared, SIZE)
