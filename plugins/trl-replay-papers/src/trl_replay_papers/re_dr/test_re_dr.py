"""Re:Dr: what stored successes train on, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods import SIZE, train
from replaying import Checked
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.errors import RefusedError
from trl_replay.testing import make_trainer

DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}


class Imitated(Checked):
    """The loss and gradient of imitation by hand: 0.3 × log-likelihood of stored successes."""

    gradients = True
    correction = "imitation"


@pytest.mark.parametrize("learning_rate", [1e-3, 3e-2])
def test_stored_successes_train_on_their_log_likelihood_alone(tmp_path: Any, learning_rate: float) -> None:
    session, watch = train(
        tmp_path,
        "stored",
        {"replay_preset": "re_dr"},
        script=([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD], [DEAD, DEAD, HALF]),
        trainer_class=Imitated,
        learning_rate=learning_rate,
        max_steps=3,
        **DR_GRPO,
    )
    trainer = watch.trainer
    assert max(trainer.gradient_errors) < 1e-4
    assert session.totals.counters["replaced"] == 4
    for taken, loss in zip(watch.taken, trainer.losses, strict=True):
        inputs = loss["inputs"]
        tokens = inputs["completion_mask"].sum(dim=1)
        signal = inputs["advantages"]
        for row, replayed in enumerate((inputs.rows[:, 0] < 0).tolist()):
            if replayed:
                assert float(signal[row]) == pytest.approx(0.3) or float(signal[row]) == 0.0
        limit = len(signal) * trainer.args.max_completion_length
        assert float(loss["loss"]) == pytest.approx(-float((signal * tokens).sum()) / limit, abs=1e-6)
        assert len(taken) % SIZE == 0
    last = trainer.losses[-1]["inputs"]
    gained = last["advantages"][last.rows[:, 0] < 0]
    assert 0 < int(torch.count_nonzero(gained)) < len(gained), "successes alone"


def test_it_asks_for_dr_grpos_advantages(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3))
    with pytest.raises(RefusedError, match="instead of 'group'"):
        trl_replay.attach(trainer, replay_preset="re_dr")
