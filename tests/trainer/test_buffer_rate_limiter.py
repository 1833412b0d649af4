"""Limits on how much is replayed, through the real trainer."""

from scenarios import train
from support import DEAD, LIVE


def test_replay_starts_once_the_running_pass_rate_is_reached(tmp_path):
    """The rate begins at the first batch's 3/12 and moves by 1/32 of the difference: 8/32, then 31/32 of it ..."""
    passing = [[1.0, 1.0, 1.0, 1.0]] * 3
    run = train(tmp_path, [LIVE, LIVE, LIVE], [DEAD] * 3, passing, max_steps=6, replay_start="pass_rate(0.28)")
    rate, expected = 0.25, [0]
    for passes in (0.0, 1.0, 1.0, 1.0, 1.0):
        rate += (passes - rate) / 32
        expected.append(3 if rate >= 0.28 else 0)
    assert run.replayed == expected == [0, 0, 0, 3, 3, 3]
    assert "replay_start='pass_rate(0.28)' allows 0 of 3 groups" in run.session.explain()
