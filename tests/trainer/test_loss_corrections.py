"""Each correction in the trainer's loss, which equals one computed by hand.

A correction gives old log-probs and weights, and the loss sees nothing else of it. So one of each form goes through
every loss type, importance level and beta, and those of the same form through two losses: what they give is their own,
what the loss makes of it is not. Those of trl-replay-papers have tests there.
"""

import pytest
from scenarios import Scenario, follow


@pytest.mark.parametrize("settings", [{"replay_correction": "truncated"}, {"replay_max_weight": 1.05}])
def test_76_as_many_rows_as_tokens_are_no_advantages_of_tokens(tmp_path, settings):
    """12 rows of 12 tokens, and a weight for each token."""
    trainer, _ = follow(tmp_path, Scenario({"max_completion_length": 12}, settings))
    assert {loss["inputs"]["completion_ids"].shape for loss in trainer.losses} == {(12, 12)}
