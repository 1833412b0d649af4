"""Dead groups are told by the advantages that train, also those that a trainer shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, Spy

from trl_replay import compat
from trl_replay.testing import make_trainer


def counted(tmp_path, script, **settings):
    """Of one batch, the share of dead groups, and how many groups were stored."""
    run = train(tmp_path, script, replaced=0, max_steps=1, **settings)
    return run.session.metrics["replay/dead_fraction"], len(run.table)


NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}
RULES = [
    ({}, [[0.7] * 8, [100.1] * 8, [0.7] * 7 + [0.6]], 1),
    ({"scale_rewards": "batch"}, [[0.7] * 8, [100.1] * 8, [100.1] * 7 + [100.0]], 1),
    ({"scale_rewards": "none"}, [[0.7] * 8, [100.1] * 8, [100.1] * 7 + [100.099]], 1),
    ({"scale_rewards": "none"}, [[1e-3] * 8, [0.0] * 8, [1e-5] + [0.0] * 7], 1),
    *((NORMALIZED, [[scale, *[0.0] * 7], [scale] * 4 + [0.0] * 4, [0] * 8], 2) for scale in (1e-5, 1e-2, 1e4)),
]
"""Settings, rewards, and how many groups are live."""


@pytest.mark.parametrize(("settings", "rewards", "live"), RULES)
def test_20_deadness_is_per_group_and_tolerates_float_noise(tmp_path, settings, rewards, live):
    assert counted(tmp_path, rewards, num_generations=8, **settings) == (pytest.approx(1 - live / 3), live)


@pytest.mark.parametrize("level", [-6.0, -300.0, 2002.4])
def test_112_a_function_that_pays_a_group_alike_keeps_no_group_from_being_live(tmp_path, level):
    """A penalty on length, say, where all completions are as long as they may be."""
    both = [Rewards([LIVE, DEAD, HALF]), Rewards([[level] * 4] * 3, name="length")]
    assert counted(tmp_path, None, rewards=both, **NORMALIZED) == (pytest.approx(1 / 3), 2)


@pytest.mark.parametrize(("weights", "live"), [([1.0, 1.0], 1), ([1.0, 2.0], 3)])
def test_20_with_normalize_then_sum_deadness_follows_the_advantages_and_not_the_sum(tmp_path, weights, live):
    both = [
        Rewards([[1, 0, 1, 0], [2, 0, 2, 0], DEAD, LIVE]),
        Rewards([[0, 3, 0, 3], [0, 1, 0, 1], DEAD, DEAD], name="second"),
    ]
    settings = {"prompts": ["1=", "2=", "3=", "4="], "per_device_train_batch_size": 16, "reward_weights": weights}
    assert counted(tmp_path, None, rewards=both, **settings, **NORMALIZED) == (1 - live / 4, live)


class Shaped(Spy):
    """Changes the advantages of the batch, as subclasses for reward shaping do."""

    shape: Any = staticmethod(lambda advantages, rewards: advantages)
    size = 4

    def _calculate_rewards(self, *args, **kwargs):
        self.raw = super()._calculate_rewards(*args, **kwargs)
        return self.raw

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        shaped = self.shape(batch["advantages"].view(-1, self.size), self.raw[:, 0].view(-1, self.size))
        return {**batch, "advantages": shaped.flatten()}


ALL_RIGHT = [1.0, 1.0, 1.0, 1.0]
SHAPED = {
    "a bonus for groups that are all right": (
        lambda advantages, rewards: advantages + 0.5 * (rewards.amin(1, keepdim=True) > 0),
        [ALL_RIGHT, DEAD, LIVE],
        [True, False, True],
    ),
    "a scale, under which noise stays noise": (
        lambda advantages, rewards: advantages * 0.5,
        [[0.7] * 4, [100.1] * 4, LIVE],
        [False, False, True],
    ),
    "no scale, with noise of its own": (
        lambda advantages, rewards: rewards - rewards.mean(1, keepdim=True) + 1e-8,
        [ALL_RIGHT, DEAD, LIVE],
        [False, False, True],
    ),
    "one group that outweighs all others": (
        lambda advantages, rewards: advantages * torch.tensor([[1e8], [0.5], [1.0]]),
        [LIVE, HALF, DEAD],
        [True, True, False],
    ),
}
"""What a trainer makes of TRL's advantages and the rewards; the rewards; and which groups are live then."""


@pytest.mark.parametrize(("shape", "rewards", "live"), SHAPED.values(), ids=SHAPED)
def test_41_shaped_advantages_that_are_equal_and_not_0_are_live_and_those_that_are_0_are_dead(
    tmp_path, shape, rewards, live
):
    trainer_class = type("Of", (Shaped,), {"shape": staticmethod(shape)})
    assert counted(tmp_path, rewards, trainer_class=trainer_class) == (live.count(False) / 3, live.count(True))


def test_162_a_plugin_that_gives_one_group_huge_advantages_leaves_the_others_live(tmp_path):
    def huge(groups):
        return groups.advantages * np.where(np.arange(len(groups)) == 0, 1e8, 0.5)[:, None]

    assert counted(tmp_path, [LIVE, HALF, DEAD], hooks={"advantages": huge}) == (1 / 3, 2)


REWARDS = [
    [[1, 0, None, 0.5], [0.7] * 4, [0, 0, 0, 0]],
    [[0.2, None, None, 0.1], [100.1, 100.1, 100.0, 100.1], [0, 0, 0, 0]],
]


@pytest.mark.parametrize("several", [False, True], ids=["one function", "two functions"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_41_trls_rules_for_advantages_stand_in_compat_bit_for_bit(tmp_path, aggregation, scale, several):
    functions = [Rewards(rewards, name=f"function{number}") for number, rewards in enumerate(REWARDS[: 1 + several])]
    trainer = make_trainer(
        tmp_path, functions, trainer_class=Shaped, max_steps=1, multi_objective_aggregation=aggregation,
        scale_rewards=scale, reward_weights=[1.0, 0.3][: 1 + several],
    )  # fmt: skip
    trainer.train()
    expected = compat.advantages(trainer.raw, compat.reward_setup(trainer), 4)
    assert torch.equal(trainer.scored[-1]["advantages"], expected)
