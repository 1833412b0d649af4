"""Strategies through the real trainer, defaults included; tests/unit/test_strategies.py has every mix of them."""

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE

KINDS = ("scorer", "evictor", "sampler", "correction")
MIX = [
    (),
    ("pass_rate", "heap", "uniform", "none"),
    ("reward_std", "reservoir", "proportional", "ratio"),
    ("recency", "fifo", "newest", "none"),
    ("constant", "reservoir", "top", "ratio"),
    ("mean_reward", "prompt_balanced", "prompt_balanced", "none"),
]
"""Of each kind, what is used; the first has every default."""
LIMITS = {"replay_max_age": 3, "replay_max_uses": 2, "replay_max_fraction": 0.7}


@pytest.mark.parametrize("names", MIX, ids=lambda names: "-".join(names) or "defaults")
def test_strategies_train_and_replay_within_the_limits(tmp_path, names):
    chosen = {f"replay_{kind}": name for kind, name in zip(KINDS, names, strict=False)}
    settings = {"max_completion_length": 2, "replay_buffer_size": 2, **chosen, **LIMITS}
    table = train(tmp_path, [LIVE, HALF, DEAD], [DEAD, LIVE, DEAD], **settings).table
    assert len(table) <= 2
    assert int(table.uses.max(initial=0)) <= 2


def test_least_used_uses_each_of_a_files_groups_as_often_as_any_other(tmp_path):
    """A second run: one generation batch, whose later iterations are drawn from what an earlier run left."""
    rows = [
        {"prompt": f"{group}=", "completion": str(row), "reward": float(row == 0)}
        for group in range(8)
        for row in range(4)
    ]
    settings = {"replay_sampler": "least_used", "replay_iterations": "replay", "replay_buffer_size": 8}
    run = train(tmp_path, [DEAD] * 3, file=rows, replaced=0, num_iterations=10, max_steps=10, **settings)
    assert run.counters["iterated"] == 27
    assert sorted(run.table.uses.tolist()) == [3, 3, 3, 3, 3, 4, 4, 4]
