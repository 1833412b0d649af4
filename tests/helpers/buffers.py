"""Buffers filled from columns and made-up groups, without a trainer."""

from __future__ import annotations

import numpy as np
import torch

from trl_replay import Group
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.strategies.storages import CpuStorage
from trl_replay.testing import make_context


class Ledger:
    """A storage of serial numbers only."""

    nbytes = 0

    def __init__(self):
        self.serials = set()

    def put(self, serial, group):
        assert serial not in self.serials
        self.serials.add(serial)

    def remove(self, serial):
        self.serials.remove(serial)


def fill(capacity, evictor, scores, batch=1, seed=0):
    """A buffer that was offered one group for each score, in batches."""
    buffer = ReplayBuffer(capacity, Ledger(), Limits())
    rng = np.random.default_rng(seed)
    context = make_context(buffer.table, capacity=capacity)
    for start in range(0, len(scores), batch):
        serials = np.arange(start, min(start + batch, len(scores)))
        before = len(buffer)
        columns = {"serial": serials, "update": serials, "score": np.asarray(scores, float)[serials]}
        stored, evicted = buffer.offer(columns, lambda table: evictor(table, context), rng)
        buffer.receive(dict.fromkeys(stored))
        assert set(stored) <= set(serials.tolist())
        assert len(buffer) == min(capacity, serials[-1] + 1) == before + len(stored) - evicted
        assert buffer.storage.serials == set(buffer.table.serial.tolist())
    return buffer


def survivors(evictor, scores, capacity, trials):
    counts = np.zeros(len(scores))
    for seed in range(trials):
        counts[fill(capacity, evictor, scores, batch=4, seed=seed).table.serial] += 1
    return counts


def group_of(nbytes: int) -> Group:
    return Group({"x": torch.zeros(nbytes - 16, dtype=torch.uint8)}, frozenset({"x"}), np.array([1]), np.array([1]))


def filled(max_bytes: int, sizes: list[int], scores: list[float]) -> ReplayBuffer:
    buffer = ReplayBuffer(100, CpuStorage(), Limits(), max_bytes)
    for serial, (size, score) in enumerate(zip(sizes, scores, strict=True)):
        columns = {"serial": np.array([serial]), "score": np.array([score]), "nbytes": np.array([size])}
        stored, _ = buffer.offer(columns, lambda table: table.score, np.random.default_rng(0))
        buffer.receive({number: group_of(size) for number in stored})
    return buffer
