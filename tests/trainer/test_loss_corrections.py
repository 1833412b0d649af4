"""Each correction in the trainer's loss, which equals one computed by hand.

A correction gives old log-probs and weights, and the loss sees nothing else of it. So one of each form goes through
every loss type, importance level and beta, and those of the same form through two losses: what they give is their own,
what the loss makes of it is not. Those of trl-replay-papers have tests there.
"""

import pytest
import torch
from scenarios import Scenario, follow, train
from support import DEAD, LIVE, Spy


@pytest.mark.parametrize("settings", [{"replay_correction": "truncated"}, {"replay_max_weight": 1.05}])
def test_76_as_many_rows_as_tokens_are_no_advantages_of_tokens(tmp_path, settings):
    """12 rows of 12 tokens, and a weight for each token."""
    trainer, _ = follow(tmp_path, Scenario({"max_completion_length": 12}, settings))
    assert {loss["inputs"]["completion_ids"].shape for loss in trainer.losses} == {(12, 12)}


def test_per_weighs_against_the_samplers_preferences(tmp_path):
    """An entry of twice the score is drawn twice as often, and so weighs 2^-β, with β on its way from 0.5 to 1."""
    settings = {"trainer_class": Spy, "learning_rate": 1e-3, "scale_rewards": "none"}
    run = train(
        tmp_path, [LIVE, [2.0, 0, 0, 0], [4.0, 0, 0, 0]], [DEAD] * 3, replaced=9, replay_scorer="reward_std",
        replay_sampler="proportional", replay_correction="per(beta=0.5, updates=4)",
        **settings,
    )  # fmt: skip
    for update, (loss, (_, after)) in enumerate(zip(run.trainer.losses, run.steps, strict=True)):
        beta, weights = 0.5 + 0.5 * update / 4, []
        for signal in after["advantages"].view(3, 4).amax(dim=1).tolist():  # 3/4 of the group's one reward
            weights += [1.0 if update == 0 else (signal / 0.75) ** -beta] * 4
        expected = torch.tensor(weights) * after["advantages"]
        torch.testing.assert_close(loss["inputs"]["advantages"].sort().values, expected.sort().values)
