"""`replay_start="adaptive"` in training: when it waits, and how long."""

from __future__ import annotations

from typing import Any

from support import DEAD, LIVE, Rewards, record, replayed

import trl_replay
from trl_replay.testing import make_trainer

SPARSE = [[LIVE, DEAD, DEAD, DEAD], *[[DEAD] * 4] * 3]
"""Of 16 groups one is live: the very first."""


def train(tmp_path: Any, *batches: Any, max_steps: int, **settings: Any) -> tuple[Any, list[int]]:
    """The session, and how many groups each step replayed."""
    trainer = make_trainer(
        tmp_path,
        Rewards(*batches),
        max_steps=max_steps,
        per_device_train_batch_size=16,
        max_completion_length=2,
    )
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    return session, replayed(steps)


def test_sparse_rewards_wait_from_the_first_update_and_no_longer_than_a_quarter_of_the_run(tmp_path: Any) -> None:
    session, filled = train(tmp_path, *SPARSE, max_steps=16)
    assert filled[:4] == [0, 0, 0, 0], "one entry is too few to be replayed again and again"
    assert all(filled[4:]), session.explain()
    assert "4 x replay_start='adaptive' (sparse rewards, too few entries yet)" in session.explain()


def test_they_wait_until_a_quarter_of_the_buffer_was_stored(tmp_path: Any) -> None:
    """A quarter of 12 is three. The third live group is in the ninth batch, and stored with the tenth."""
    session, filled = train(tmp_path, *SPARSE * 3, max_steps=48, replay_buffer_size=12)
    assert filled[:9] == [0] * 9
    assert filled[9:12] == [3] * 3, session.explain()


def test_live_groups_that_come_often_do_not_wait(tmp_path: Any) -> None:
    """Four live groups are taken for often, at the beginning."""
    _, filled = train(tmp_path, [LIVE, LIVE, DEAD, DEAD], max_steps=40)
    assert filled[:3] == [0, 2, 2]


def test_once_it_has_begun_it_does_not_wait_again(tmp_path: Any) -> None:
    """Four groups of 40 are live, then none: fewer than one in ten."""
    _, filled = train(tmp_path, [LIVE] * 4, [DEAD] * 4, max_steps=80, replay_buffer_size=256)
    assert filled[1:] == [4] * 79
