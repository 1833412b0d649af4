"""Limits on how much is replayed, through the real trainer."""

from __future__ import annotations

from typing import Any

import pytest
from support import DEAD, HALF, LIVE, Rewards, record, replayed

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer


def test_nothing_is_replayed_before_the_start(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD] * 3), max_steps=6)
    session = trl_replay.attach(trainer, replay_start=3)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 0, 0, 3, 3, 3]
    assert len(session.buffer) == 3, "the buffer fills from the beginning"
    assert "2 x replay_start allows 0 of 3 groups" in session.explain()


SPARSE = [LIVE, *[DEAD] * 15], [DEAD] * 16, [LIVE, *[DEAD] * 15], [DEAD] * 16
"""Batches of 16 groups, one of which is live in every second batch: of 64 groups, two."""


def sparse_run(tmp_path: Any, script: Any, **settings: Any) -> tuple[list[int], trl_replay.Session]:
    trainer = make_trainer(tmp_path, Rewards(*script), max_steps=len(script), per_device_train_batch_size=64)
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    return replayed(steps), session


def test_with_sparse_rewards_replay_waits_for_a_quarter_of_the_buffer(tmp_path: Any) -> None:
    script = [*SPARSE, *SPARSE, [LIVE, LIVE, *[DEAD] * 14], [DEAD] * 16, [DEAD] * 16]
    counts, session = sparse_run(tmp_path, script, replay_buffer_size=20)
    # three batches are too few to judge by; then 5 entries are needed: the ninth batch's two are the fifth and sixth
    assert counts == [0, 1, 1, 0, 0, 0, 0, 0, 0, 6, 6]
    assert (
        "6 x replay_start='adaptive' (sparse rewards, too few entries yet) allows 0 of 16 groups" in session.explain()
    )
    for start in (0, None):
        assert sparse_run(tmp_path, script, replay_buffer_size=20, replay_start=start)[0][3:7] == [2, 2, 3, 3]


def test_it_does_not_wait_for_live_groups_that_have_ceased_to_come(tmp_path: Any) -> None:
    """One group of the first 16 was live, and then none: after 64 groups more there is nothing to wait for."""
    script = [[LIVE, *[DEAD] * 15], *[[DEAD] * 16] * 7]
    assert sparse_run(tmp_path, script)[0] == [0, 1, 1, 0, 0, 1, 1, 1]


def test_it_does_not_wait_for_entries_that_a_limit_lets_leave_meanwhile(tmp_path: Any) -> None:
    """Of a live group in every second batch no more than two are ever young enough, and five are to come first."""
    counts, _ = sparse_run(tmp_path, SPARSE * 3, replay_buffer_size=20, replay_max_age=4)
    assert counts == [0, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 2]


def test_with_rewards_that_are_not_sparse_nothing_waits(tmp_path: Any) -> None:
    script = [[LIVE, HALF, *[DEAD] * 14], [LIVE, HALF, *[DEAD] * 14], *[[DEAD] * 16, [*[LIVE] * 4, *[DEAD] * 12]] * 3]
    counts, _ = sparse_run(tmp_path, script)
    assert counts == [0, 2, 4, 4, 8, 8, 12, 12]


def test_replay_starts_once_the_running_pass_rate_is_reached(tmp_path: Any) -> None:
    """The rate begins at the first batch's 3/12 and moves by 1/32 of the difference: 8/32, then 31/32 of it ..."""
    passing = [[1.0, 1.0, 1.0, 1.0]] * 3
    trainer = make_trainer(tmp_path, Rewards([LIVE, LIVE, LIVE], [DEAD] * 3, passing), max_steps=6)
    session = trl_replay.attach(trainer, replay_start_pass_rate=0.28)
    steps = record(session)
    trainer.train()
    rate, expected = 0.25, [0]
    for passes in (0.0, 1.0, 1.0, 1.0, 1.0):
        rate += (passes - rate) / 32
        expected.append(3 if rate >= 0.28 else 0)
    assert replayed(steps) == expected == [0, 0, 0, 3, 3, 3]
    assert "replay_start_pass_rate allows 0 of 3 groups" in session.explain()


def test_what_passes_is_a_setting(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([[3.0, 1, 1, 1]] * 3, [DEAD] * 3), max_steps=3)
    session = trl_replay.attach(trainer, replay_start_pass_rate=0.2, replay_pass_reward=2.0)
    trainer.train()
    assert session.components.rate_limiter.state_dict()["pass_rate"] == pytest.approx(0.25 * (31 / 32) ** 2)


def test_no_more_is_replayed_than_the_samples_per_insert(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD] * 3, [DEAD] * 3, [LIVE, DEAD, DEAD]), max_steps=7
    )
    session = trl_replay.attach(trainer, replay_samples_per_insert=1.5)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 2, 1, 0, 1, 2, 1], "3, 4, 6 and 7 in all, with 2, 3, 4 and 5 groups stored"
    assert "replay_samples_per_insert allows" in session.explain()


def test_less_is_replayed_while_the_effective_sample_size_is_below_the_floor(tmp_path: Any) -> None:
    script = [LIVE] * 4, [DEAD] * 4
    counts, shares = {}, {}
    for floor in (None, 0.0, 1.0):
        trainer = make_trainer(
            tmp_path / str(floor), Rewards(*script), max_steps=7, learning_rate=1e-2, per_device_train_batch_size=16
        )
        session = trl_replay.attach(trainer, replay_min_ess=floor)
        steps = record(session)
        trainer.train()
        counts[floor] = [int((after[ROWS][:, 0] < 0).sum()) // 4 for _, after in steps]
        shares[floor] = session.components.rate_limiter.fraction
    assert counts[None] == counts[0.0] == [0, 4, 4, 4, 4, 4, 4]
    assert counts[1.0] == [0, 4, 2, 1, 1, 1, 1], "one group is always left, or nothing would be measured again"
    assert shares == {None: 1.0, 0.0: 1.0, 1.0: 0.125}, "no less than half of what one group is"
    assert "replay_min_ess allows 1 of 4 groups" in session.explain()
