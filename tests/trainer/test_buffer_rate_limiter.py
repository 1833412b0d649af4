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
