"""adv-PER: which rows are drawn, and what they train on, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import DEAD, HALF, LIVE, SIZE, train

from trl_replay import ConfigurationError
from trl_replay.testing import make_context, make_groups, make_table
from trl_replay_papers.adv_per import GroupsOfRows, Rows, priorities

ADVANTAGES = np.array([[1.5, -0.5, -0.5, -0.5], [0.25, 0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]])
SCRIPT = ([LIVE, HALF, HALF], [LIVE, DEAD, DEAD], [HALF, DEAD, DEAD], [DEAD, DEAD, DEAD])


def table() -> Any:
    return make_table([1.0] * 3, row_advantage=ADVANTAGES, row_masked=np.zeros((3, 4), bool))


def test_rows_are_drawn_in_proportion_to_the_root_of_their_advantages() -> None:
    weights = np.sqrt(np.abs(ADVANTAGES[:2]) + 1e-6).ravel()
    assert priorities(table(), 0.5)[:2].ravel() == pytest.approx(weights)
    context = make_context(table(), num_generations=4)
    drawn, slots, counts = np.array([[0, 1]]), make_groups([[0.0] * 4]), np.zeros(8)
    for _ in range(1500):
        taken = Rows()(table(), drawn, slots, context)[0]
        assert len(set(taken.tolist())) == 4, "without replacement"
        counts[taken[0]] += 1
    share = weights / weights.sum()
    assert np.abs(counts / 1500 - share).max() < 4 * np.sqrt(0.25 / 1500)


def test_groups_are_drawn_by_the_sum_of_their_rows_priorities() -> None:
    context, counts = make_context(table(), num_generations=4), np.zeros(3)
    for _ in range(1500):
        counts[GroupsOfRows(entries=1)(table(), 1, context)[0, 0]] += 1
    sums = np.sqrt(np.abs(ADVANTAGES) + 1e-6).sum(axis=1)
    assert np.abs(counts / 1500 - sums / sums.sum()).max() < 4 * np.sqrt(0.25 / 1500)


def test_every_slot_gets_a_group_before_any_gets_two() -> None:
    context = make_context(table(), num_generations=4)
    drawn = GroupsOfRows()(table(), 2, context)
    assert drawn.shape == (2, 2)
    assert (drawn[:, 0] >= 0).all()
    assert sorted(drawn.ravel().tolist()) == [-1, 0, 1, 2]


def test_rows_of_any_prompt_keep_their_advantages_in_up_to_half_of_a_batch_and_leave_after_ten_updates(
    tmp_path: Any,
) -> None:
    settings = {"replay_preset": "adv_per", "replay_start": 2, "replay_max_fraction": 0.7}
    session, watch = train(tmp_path, "stored", settings, script=SCRIPT, max_steps=14)
    assert not watch.taken[1], "not before the start"
    prompts = set()
    for step, taken in enumerate(watch.taken):
        ages = [step - watch.origin[serial][0] for serial, _ in taken.values()]
        assert max(ages, default=0) <= 10
        assert len({row // SIZE for row in taken}) <= 2, "of three slots"
        prompts |= {row // SIZE == watch.origin[serial][1] for row, (serial, _) in taken.items()}
    assert prompts == {True, False}, "of the slot's own prompt and of others"
    assert not watch.taken[13], "the last live groups are eleven updates old"
    assert session.config.replay_unfilled == "exclude"


@pytest.mark.parametrize(("strategy", "arguments"), [(GroupsOfRows, {"entries": 0}), (Rows, {"alpha": 0})])
def test_arguments_that_can_not_be_used_are_refused(strategy: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="can't be used"):
        strategy(**arguments)
