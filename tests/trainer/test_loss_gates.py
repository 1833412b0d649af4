"""Gates inside the loss: what each lets through, against losses computed by hand, and what is counted."""

import pytest
from replaying import CORRECTED as SCRIPT
from scenarios import CAPPED, follow
from support import Rewards, Spy, logged

import trl_replay
from trl_replay.testing import make_trainer


@pytest.mark.parametrize("loss", ["grpo", "sapo"])
def test_a_gated_row_whose_ratio_overflows_leaves_everything_finite(tmp_path, loss):
    trainer = make_trainer(
        tmp_path, Rewards(*SCRIPT), trainer_class=Spy, max_steps=3, loss_type=loss, beta=0.3, learning_rate=1e-2
    )
    session = trl_replay.attach(trainer, replay_correction="sequence_mask")
    load = session.buffer.load

    def far_off(serial):
        group = load(serial)
        group.tensors["old_per_token_logps"] -= 200.0
        return group

    session.buffer.load = far_off
    trainer.train()
    assert logged(trainer, "replay/gated_fraction")[-1] == 1.0
    assert all(bool(seen["loss"].isfinite()) for seen in trainer.losses)
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


@pytest.mark.parametrize("name", CAPPED)
def test_a_weight_cap_bounds_ratio_times_weight(tmp_path, name):
    trainer, _ = follow(tmp_path, name)
    shares = logged(trainer, "replay/capped_fraction")
    assert all(0 <= share <= 1 for share in shares)
    assert "topr" in name or any(share > 0 for share in shares)
