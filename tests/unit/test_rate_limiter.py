"""How many slots replay may fill: each limit by hand, and that all of them go on where a checkpoint left them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deciding import settings_of

from trl_replay.buffer.rate_limiter import RateLimiter
from trl_replay.testing import make_groups

LIVE = [1.0, 0.0, 0.0, 0.0]
DEAD = [0.0] * 4


def limiter(capacity: int = 64, **settings: Any) -> RateLimiter:
    return RateLimiter(settings_of(**settings).rate_limits, capacity)


def seen(limits: RateLimiter, *batches: list[list[float]]) -> None:
    for rewards in batches:
        groups = make_groups(rewards)
        limits.observe(groups, groups.reward >= 0.5)


def test_without_limits_every_slot_may_be_filled() -> None:
    assert limiter().slots_allowed(16, 0)[0] == 16


@pytest.mark.parametrize(("fraction", "slots"), [(0.0, 0), (0.34, 1), (1 / 3, 1), (0.3, 0), (0.67, 2), (1.0, 3)])
def test_a_fraction_is_rounded_down(fraction: float, slots: int) -> None:
    assert limiter(replay_max_fraction=fraction).slots_allowed(3, 0) == (slots, "replay_max_fraction")


def test_nothing_is_filled_before_the_update_of_the_start() -> None:
    limits = limiter(replay_start=5)
    assert limits.slots_allowed(4, 4) == (0, "replay_start")
    assert limits.slots_allowed(4, 5)[0] == 4
    assert limiter(replay_start=None).slots_allowed(4, 0)[0] == 4


def test_the_running_pass_rate_must_reach_the_start_rate() -> None:
    limits = limiter(replay_start_pass_rate=0.25)
    assert limits.slots_allowed(4, 9) == (0, "replay_start_pass_rate"), "nothing was seen yet"
    seen(limits, [LIVE])
    assert limits.slots_allowed(4, 9)[0] == 4
    assert limits.state_dict()["pass_rate"] == 0.25, "the first batch's rate is where it starts"
    seen(limits, [DEAD])
    assert limits.state_dict()["pass_rate"] == 0.25 * 31 / 32
    assert limits.slots_allowed(4, 9)[0] == 0


def test_samples_per_insert_count_all_inserts_and_all_draws() -> None:
    limits = limiter(replay_samples_per_insert=1.5)
    limits.inserted(3)
    assert limits.slots_allowed(9, 9) == (4, "replay_samples_per_insert")
    limits.drawn(3)
    limits.inserted(1)
    assert limits.slots_allowed(9, 9)[0] == 3
    limits.drawn(5)
    assert limits.slots_allowed(9, 9)[0] == 0, "never below nothing"


def test_the_tightest_limit_says_so() -> None:
    limits = limiter(replay_samples_per_insert=1.0, replay_max_fraction=0.5, replay_min_ess=0.5)
    limits.inserted(5)
    assert limits.slots_allowed(8, 9) == (4, "replay_max_fraction")
    limits.drawn(2)
    assert limits.slots_allowed(8, 9) == (3, "replay_samples_per_insert")
    limits.fraction = 0.25
    assert limits.slots_allowed(8, 9) == (2, "replay_min_ess")


def test_the_floor_lets_go_again() -> None:
    """However long it was below: it never gets further down than one group."""
    limits = limiter(replay_min_ess=0.5)
    most = []
    for share in (0.4, 0.4, 0.4, 0.6, 0.5, None, 0.9, *[0.1] * 1100, *[0.9] * 4):
        limits.measured(share)
        seen(limits, [LIVE] * 16)
        most.append(limits.slots_allowed(16, 10)[0])
    assert most[:7] == [8, 4, 2, 4, 8, 8, 16]
    assert most[7:12] == [8, 4, 2, 1, 1]
    assert most[-5:] == [1, 2, 4, 8, 16]


def test_without_a_floor_the_effective_sample_size_changes_nothing() -> None:
    limits = limiter()
    limits.measured(0.0)
    assert limits.fraction == 1.0


# with replay_start="adaptive"


def adaptive(*batches: list[list[float]], capacity: int = 64, inserted: int = 1) -> int:
    """Slots allowed of 16 after these batches."""
    limits = limiter(capacity, replay_start="adaptive")
    seen(limits, *batches)
    limits.inserted(inserted)
    return limits.slots_allowed(16, 99)[0]


ONE_OF_16, NONE_OF_16 = [LIVE, *[DEAD] * 15], [DEAD] * 16


def test_sparse_rewards_wait_from_the_first_batch_until_enough_was_stored() -> None:
    assert [adaptive(*[ONE_OF_16] * batches) for batches in (1, 2, 3, 4, 9)] == [0] * 5
    assert [adaptive(ONE_OF_16, inserted=count) for count in (15, 16)] == [0, 16]
    assert [adaptive(ONE_OF_16, capacity=20, inserted=count) for count in (4, 5)] == [0, 16], "a quarter of the buffer"


def test_rewards_are_sparse_below_one_live_group_in_ten() -> None:
    one_of_10, none_of_10 = [LIVE, *[DEAD] * 9], [DEAD] * 10
    assert adaptive(*[one_of_10] * 7) == 16
    assert adaptive(*[one_of_10] * 6, none_of_10) == 0


def test_in_the_beginning_they_are_sparse_below_four_live_groups() -> None:
    """However many of the few that were seen: one batch of three groups says little."""
    assert [adaptive([LIVE] * live) for live in (1, 2, 3, 4)] == [0, 0, 0, 16]
    assert [adaptive([LIVE], [LIVE], [LIVE] * live) for live in (1, 2)] == [0, 16]


def test_after_a_warm_start_nothing_waits() -> None:
    limits = limiter(replay_start="adaptive")
    seen(limits, *[ONE_OF_16] * 4)
    limits.inserted(4)
    assert limits.slots_allowed(16, 9)[0] == 0
    limits.prefilled()
    assert limits.slots_allowed(16, 9)[0] == 16


def test_what_has_begun_does_not_wait_again() -> None:
    limits = limiter(replay_start="adaptive")
    seen(limits, [LIVE] * 4)
    limits.inserted(4)
    assert limits.slots_allowed(16, 1)[0] == 16
    limits.drawn(2)
    seen(limits, *[ONE_OF_16] * 9)
    assert limits.slots_allowed(16, 9)[0] == 16


def test_nothing_waits_longer_than_a_quarter_of_the_run() -> None:
    limits = limiter(replay_start="adaptive")
    seen(limits, ONE_OF_16)
    limits.inserted(1)
    limits.planned = 22
    assert [limits.slots_allowed(16, update)[0] for update in (1, 4, 5)] == [0, 0, 16]


def test_it_does_not_wait_where_no_live_group_came_or_none_comes_any_more() -> None:
    assert adaptive(*[NONE_OF_16] * 9, inserted=0) == 16
    assert adaptive(ONE_OF_16, inserted=0) == 16, "it is not stored yet: the buffer is empty"
    assert adaptive(ONE_OF_16, *[NONE_OF_16] * 10) == 0, "160 groups since, which is four times 40"
    assert adaptive(ONE_OF_16, *[NONE_OF_16] * 11) == 16
    assert adaptive(*[NONE_OF_16] * 5, ONE_OF_16, *[NONE_OF_16] * 24) == 0, "the distance is 96 here"
    assert adaptive(*[NONE_OF_16] * 5, ONE_OF_16, *[NONE_OF_16] * 25) == 16
    assert adaptive(ONE_OF_16, NONE_OF_16, ONE_OF_16, *[NONE_OF_16] * 6) == 0, "and 24 here"
    assert adaptive(ONE_OF_16, NONE_OF_16, ONE_OF_16, *[NONE_OF_16] * 7) == 16


def test_the_limits_go_on_where_a_checkpoint_left_them() -> None:
    settings = {"replay_samples_per_insert": 1.5, "replay_start_pass_rate": 0.01, "replay_min_ess": 0.9}
    limits, resumed = limiter(**settings), limiter(**settings)
    seen(limits, [LIVE, DEAD, DEAD], [DEAD] * 3)
    limits.measured(0.1)
    limits.inserted(7)
    limits.drawn(4)
    limits.prefilled()
    state = limits.state_dict()
    new = limiter(**settings).state_dict()
    assert all(state[name] != new[name] for name in state), "nothing is as in a new one"
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state
    for groups in (1, 4, 8, 32):
        assert resumed.slots_allowed(groups, 9) == limits.slots_allowed(groups, 9)
    assert resumed.slots_allowed(32, 9) == (6, "replay_samples_per_insert"), "ten for seven inserts, less four"
