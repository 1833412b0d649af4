"""`replay_unfilled`: what becomes of dead groups that nothing fills, through the real loss of every loss type."""

import pytest
from scenarios import train
from support import DEAD

ALL_DEAD = [DEAD, DEAD, DEAD]


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo"])
def test_mask_takes_the_gradient_of_kl_and_entropy(tmp_path, loss):
    """A batch of dead groups alone trains nothing, though beta and the entropy bonus are not 0; as stock has it, it
    does."""
    norms = {}
    for choice in ("keep", "mask", "exclude"):
        settings = {"loss_type": loss, "beta": 0.3, "entropy_coef": 0.1, "max_steps": 2, "learning_rate": 2e-2}
        run = train(tmp_path / choice, ALL_DEAD, replaced=0, replay_unfilled=choice, **settings)
        norms[choice] = run.logged("grad_norm")
    assert norms["keep"][1] > 1e-3
    assert norms["mask"] == norms["exclude"] == [0.0, 0.0]


def test_excluding_all_groups_changes_no_denominator(tmp_path):
    run = train(tmp_path, ALL_DEAD, replaced=0, replay_unfilled="exclude", loss_type="dapo", beta=0.3)
    assert run.logged("loss") == [0.0] * 4
    for before, after in run.steps:
        assert after["num_items_in_batch"] is before["num_items_in_batch"]
