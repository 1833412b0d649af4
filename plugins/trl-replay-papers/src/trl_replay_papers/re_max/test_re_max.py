"""Re:Max: MaxRL's advantages of fresh rows, and what stored successes train on, by hand."""

from __future__ import annotations

from typing import Any

from methods import maxrl_advantages, train
from replaying import Checked
from support import DEAD, HALF, LIVE


class Imitated(Checked):
    """The loss and gradient of imitation by hand: 0.3 × log-likelihood of stored successes."""

    gradients = True
    correction = "imitation"


def test_fresh_rows_have_maxrls_advantages_and_stored_successes_a_fixed_coefficient(tmp_path: Any) -> None:
    session, watch = train(
        tmp_path,
        maxrl_advantages,
        {"replay_preset": "re_max"},
        script=([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD], [DEAD, DEAD, HALF]),
        trainer_class=Imitated,
        loss_type="dr_grpo",
        learning_rate=3e-2,
        max_steps=3,
    )
    assert max(watch.trainer.gradient_errors) < 1e-4
    assert session.totals.counters["replaced"] == 4
    for loss in watch.trainer.losses:
        inputs = loss["inputs"]
        is_stored = inputs.rows[:, 0] < 0
        assert {round(value, 6) for value in inputs["advantages"][is_stored].tolist()} <= {0.0, 0.3}
        assert {round(value, 6) for value in inputs["advantages"][~is_stored].tolist()} <= {0.0, 3.0, 1.0, -1.0}
