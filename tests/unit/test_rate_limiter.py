"""How many slots replay may fill."""

from __future__ import annotations

import trl_replay
from trl_replay.buffer.rate_limiter import RateLimiter
from trl_replay.testing import make_groups


def test_the_floor_lets_go_again() -> None:
    """However long it was below: it never gets further down than one group."""
    limiter = RateLimiter(trl_replay.ReplayConfig(replay_min_ess=0.5), 64)
    fresh = make_groups([[1, 0, 0, 0]] * 16)
    most = []
    for share in (0.4, 0.4, 0.4, 0.6, 0.5, None, 0.9, *[0.1] * 1100, *[0.9] * 4):
        limiter.measured(share)
        limiter.observe(fresh)
        most.append(limiter.slots_allowed(16, 10)[0])
    assert most[:7] == [8, 4, 2, 4, 8, 8, 16]
    assert most[7:12] == [8, 4, 2, 1, 1]
    assert most[-5:] == [1, 2, 4, 8, 16]
