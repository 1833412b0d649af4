"""Loss and gradient stay finite and bounded, however far the policy has moved from stored tokens."""

import math

import numpy as np
import pytest
import torch
from bounded import check_bounds
from corrected import CORRECTIONS, MASKED, OF_TOKENS, PROXIMAL
from support import DEAD, LIVE, LOSSES, Rewards, logged
from transformers import TrainerCallback

import trl_replay
from trl_replay.loss.supply import Bounds
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.usefixtures("all_metrics")

ALL = [*CORRECTIONS, MASKED, PROXIMAL, "per"]


class Sharpen(TrainerCallback):
    """After the first update the policy becomes all but deterministic, as many updates would make it."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            with torch.no_grad():
                kwargs["model"].lm_head.weight.mul_(300.0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"replay_max_weight": 2.0}, {"replay_correction": "truncated"}, {"replay_correction": "none"}],
    ids=str,
)
def test_37_a_policy_that_left_the_stored_tokens_behind_ruins_no_weight(tmp_path, settings):
    """The reference finds a replayed token e^88 times as likely as the policy does: exp(88) times a ratio of 0."""
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), max_steps=3, beta=0.04)
    trainer.add_callback(Sharpen())
    session = trl_replay.attach(trainer, **settings)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert all(np.isfinite(norm) for norm in logged(trainer, "grad_norm"))
    dropped = logged(trainer, "replay/kl_dropped_fraction")
    assert len(dropped) == 2
    assert all(0 < share <= 1 for share in dropped), "what was dropped is counted"


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_37_no_log_probs_of_replayed_tokens_give_a_ruinous_loss_or_gradient(tmp_path, loss, level):
    """A fresh token's gradient is its advantage, and what KL to a reference it was sampled near to gives. A replayed
    token's is at most 20 times its advantage, and 440 times beta."""
    names = [name for name in ALL if level == "token" or loss == "cispo" or name not in OF_TOKENS]
    bias_correction = (LOSSES.index(loss) + (level == "token")) % 2 == 0  # with every loss, and at either level
    check_bounds(tmp_path, names, loss, level, bias_correction)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 20.0), (torch.bfloat16, 20.0), (torch.float16, 5.545)])
def test_37_log_ratios_stay_within_half_the_log_of_a_types_largest_number(dtype, limit):
    new = torch.tensor([[-30.0, -1.0, -1.0]], dtype=dtype)
    old = torch.tensor([[-1.0, -30.0, -1.5]])
    mask = torch.ones_like(old, dtype=torch.bool)
    rows = trl_replay.ReplayedRows(new, old, new, mask, torch.tensor([-1.0]), torch.tensor([1]))
    ratios = new.float() - Bounds()(rows, trl_replay.Corrected(old)).old_logps
    torch.testing.assert_close(ratios, torch.tensor([[-limit, math.log(20.0), 0.5]]), rtol=0.01, atol=0.01)
