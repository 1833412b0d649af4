"""Slots that replay may fill: rounding, and when an adaptive start waits."""

import json

import pytest

from trl_replay import ReplayConfig
from trl_replay.base.progress import Clock
from trl_replay.buffer.replay_buffer import RateLimiter, RateLimits
from trl_replay.testing import make_groups

LIVE = [1.0, 0.0, 0.0, 0.0]
DEAD = [0.0] * 4


def limiter(**settings):
    config = ReplayConfig(**{"replay_start": 0, **settings})
    limits = RateLimits(config.replay_start, config.replay_max_fraction)
    return RateLimiter(limits)


def allowed(limits, groups, update):
    return limits.slots_allowed(groups, 64, Clock(update))


def seen(limits, *batches):
    for rewards in batches:
        groups = make_groups(rewards)
        limits.observe(groups, groups.reward >= 0.5)


ONE_OF_16, NONE_OF_16 = [LIVE, *[DEAD] * 15], [DEAD] * 16
ONE_OF_10, NONE_OF_10 = ONE_OF_16[:10], [DEAD] * 10


@pytest.mark.parametrize(
    ("batches", "stored", "slots"),
    [
        ([ONE_OF_16], 1, 0),
        ([ONE_OF_16], 15, 0),
        ([ONE_OF_16], 16, 16),  # a quarter of the buffer
        ([ONE_OF_10] * 7, 1, 16),  # one live group in ten is enough
        ([*[ONE_OF_10] * 6, NONE_OF_10], 1, 0),
        ([[LIVE], [LIVE], [LIVE]], 1, 0),  # of the few that were seen in the beginning four must be live
        ([[LIVE], [LIVE], [LIVE] * 2], 1, 16),
        ([NONE_OF_16] * 9, 0, 16),  # no live group came
        ([ONE_OF_16], 0, 16),  # it is not stored yet
        ([ONE_OF_16, *[NONE_OF_16] * 10], 1, 0),  # 160 groups since, which is four times 40
        ([ONE_OF_16, *[NONE_OF_16] * 11], 1, 16),
        ([*[NONE_OF_16] * 5, ONE_OF_16, *[NONE_OF_16] * 24], 1, 0),  # the distance is 96 here
        ([*[NONE_OF_16] * 5, ONE_OF_16, *[NONE_OF_16] * 25], 1, 16),
        ([ONE_OF_16, NONE_OF_16, ONE_OF_16, *[NONE_OF_16] * 6], 1, 0),  # and 24 here
        ([ONE_OF_16, NONE_OF_16, ONE_OF_16, *[NONE_OF_16] * 7], 1, 16),
    ],
)
def test_an_adaptive_start_waits_while_live_groups_are_rare_and_still_come(batches, stored, slots):
    limits = limiter(replay_start="adaptive")
    seen(limits, *batches)
    limits.inserted += stored
    assert allowed(limits, 16, 99)[0] == slots


@pytest.mark.parametrize("begun", ["drawn", "prefilled"])
def test_a_resumed_adaptive_start_that_has_begun_does_not_wait_again(begun):
    limits, resumed = limiter(replay_start="adaptive"), limiter(replay_start="adaptive")
    seen(limits, ONE_OF_16)
    limits.inserted += 1
    assert allowed(limits, 16, 99)[0] == 0
    setattr(limits, begun, 1)
    resumed.load_state_dict(json.loads(json.dumps(limits.state_dict())))
    assert allowed(limits, 16, 99)[0] == allowed(resumed, 16, 99)[0] == 16
