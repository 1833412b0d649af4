"""A reward of 0.9 is a success where 0.9 is the least reward of one: TRL keeps rewards as float32."""

from __future__ import annotations

import numpy as np
import pytest
from trl_replay_papers.arpo import make_one_success
from trl_replay_papers.exgrpo import ExGRPO
from trl_replay_papers.maxrl import MaxRL
from trl_replay_papers.rl_zvp import RlZvp
from trl_replay_papers.rlep import make_successes
from trl_replay_papers.sign_advantage import SignAdvantage

from trl_replay.testing import make_context, make_groups, make_table

MIXED = np.float32([[0.9, 0.0, 0.0, 0.0]]).tolist()
ALL_RIGHT = np.float32([[0.9, 0.9, 0.9, 0.9]]).tolist()
CONTEXT = make_context(make_table([]))


def test_float32_rounds_this_threshold_down() -> None:
    assert MIXED[0][0] < 0.9


def test_methods_that_shape_advantages() -> None:
    maxrl = MaxRL(pass_reward=0.9).trl_replay_advantages(make_groups(MIXED), CONTEXT)
    assert maxrl.tolist() == [[3.0, -1.0, -1.0, -1.0]]
    signs = SignAdvantage(pass_reward=0.9).trl_replay_advantages(make_groups(MIXED), CONTEXT)
    assert signs.tolist() == [[1.0, -1.0, -1.0, -1.0]]
    shaped = RlZvp(pass_reward=0.9).trl_replay_advantages(make_groups(ALL_RIGHT), CONTEXT)
    assert shaped.tolist() == [[0.1] * 4]


@pytest.mark.parametrize("mixer", [make_successes(rows=1, reward=0.9), ExGRPO(pass_reward=0.9).surest])
def test_methods_that_take_stored_successes(mixer: object) -> None:
    table = make_table([1.0], row_rewards=np.array(MIXED)[:, :, None])
    taken = mixer(table, np.array([[0]]), make_groups([[0.0] * 4]), make_context(table))  # type: ignore[operator]
    assert sorted(taken.ravel().tolist()) == [-1, -1, -1, 0]


def test_exgrpo_stores_what_is_partly_solved() -> None:
    worth = ExGRPO(pass_reward=0.9).half_solved(make_groups([*MIXED, *ALL_RIGHT]), CONTEXT)
    assert np.isfinite(worth).tolist() == [True, False]


def test_arpo_takes_no_row_at_its_threshold() -> None:
    """What a failure gets for its format, with a success on top."""
    rewards = np.float32([[0.1, 0.1, 0.1, 1.1]])
    table = make_table([1.0], row_rewards=rewards.astype(np.float64)[:, :, None])
    contexts = [make_context(table, seed=seed) for seed in range(20)]
    mixer = make_one_success()
    drawn = {int(mixer(table, np.array([[0]]), make_groups([[0.0] * 4]), each)[0, 0]) for each in contexts}
    assert drawn == {3}
