"""The stale ablation: the oldest groups, and none that is too young, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import SIZE
from support import DEAD, HALF, LIVE, Rewards, Spy

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.testing import make_context, make_table, make_trainer
from trl_replay_papers.popo_stale import make_oldest

SCRIPT = ([LIVE, HALF, LIVE], [DEAD, DEAD, LIVE], [LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [DEAD, DEAD, DEAD])


def test_dead_slots_get_the_oldest_groups_of_at_least_this_age(tmp_path: Any) -> None:
    from replaying import Watch

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=5, trainer_class=Spy)
    settings = {"replay_preset": "popo_stale", "replay_sampler": "popo_stale/oldest(least_age=2)"}
    session = trl_replay.attach(trainer, **settings)
    watch = Watch(session, SIZE, trainer._tokenizer.pad_token_id)
    trainer.train()
    live = [(step, slot) for step, rewards in enumerate(SCRIPT) for slot in range(3) if rewards[slot] != DEAD]
    for step, rewards in enumerate(SCRIPT):
        dead = sum(group == DEAD for group in rewards)
        taken = watch.taken[step]
        origins = sorted({watch.origin[serial] for serial, _ in taken.values()})
        assert origins == [one for one in live if one[0] <= step - 2][:dead]


def test_a_slot_stays_empty_where_all_are_too_young() -> None:
    table = make_table([1.0] * 3, serial=[4, 2, 3], update=[90, 88, 91])
    context = make_context(table, update=100)
    assert make_oldest()(table, 3, context).tolist() == [1, 0, -1], "ten updates, the oldest first"
    assert make_oldest(least_age=0)(table, 2, context).tolist() == [1, 2]
    assert np.array_equal(make_oldest(least_age=50)(table, 2, context), [-1, -1])


@pytest.mark.parametrize("least_age", [-1, 2.5, True])
def test_an_age_that_can_not_be_used_is_refused(least_age: Any) -> None:
    with pytest.raises(ConfigurationError, match="least_age="):
        make_oldest(least_age)
