"""Evictors by hand, and which groups survive many rounds of them."""

import numpy as np
import pytest
from buffers import nothing

from trl_replay.buffer.replay_buffer import Store
from trl_replay.strategies import policies
from trl_replay.testing import make_context


def fill(capacity, evictor, scores, batch=1, seed=0):
    """A buffer that was offered one group for each score, in batches."""
    buffer = Store(capacity)
    rng = np.random.default_rng(seed)
    context = make_context(buffer.table, capacity=capacity)
    for start in range(0, len(scores), batch):
        serials = np.arange(start, min(start + batch, len(scores)))
        before = len(buffer)
        columns = {"serial": serials, "update": serials, "score": np.asarray(scores, float)[serials]}
        buffer.append(columns, rng)
        left = buffer.evict(lambda table: evictor(table, context))
        buffer.receive(nothing(serial for serial in serials.tolist() if serial in buffer.table.serial))
        assert len(buffer) == min(capacity, serials[-1] + 1) == before + len(serials) - left
        assert buffer.held() == buffer.table.serial.tolist()
    return buffer


def survivors(evictor, scores, capacity, trials):
    counts = np.zeros(len(scores))
    for seed in range(trials):
        counts[fill(capacity, evictor, scores, batch=4, seed=seed).table.serial] += 1
    return counts


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_34_two_hundred_equal_scores_through_a_heap_of_64_leave_the_newest_64(batch):
    buffer = fill(64, policies.heap, [1.0] * 200, batch)
    assert sorted(buffer.table.serial.tolist()) == list(range(136, 200))


def test_a_reservoir_is_a_uniform_sample_of_everything_offered():
    count, capacity, trials = 24, 6, 800
    counts = survivors(policies.reservoir, [1.0] * count, capacity, trials)
    share = capacity / count
    variance = trials * share * (1 - share) * count / (count - 1)  # of a sample of fixed size
    statistic = ((counts - trials * share) ** 2).sum() / variance
    assert statistic < 49.73, f"p < 0.001 with 23 degrees of freedom: {counts}"
