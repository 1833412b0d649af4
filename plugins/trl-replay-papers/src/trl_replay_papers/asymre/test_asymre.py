"""AsymRE: loss and gradient by hand, and in which units its number is."""

from __future__ import annotations

from typing import Any

import pytest
from corrected import TWO_LOSSES, allowed
from replaying import Checked, train_corrected

from trl_replay import ConfigurationError
from trl_replay_papers.asymre import make_asymre


class Compared(Checked):
    """Gradients too."""

    gradients = True


@pytest.mark.parametrize(("correction", "loss", "level", "beta"), allowed(["asymre"], [0.1], TWO_LOSSES))
def test_loss_and_gradient_are_those_by_hand(
    tmp_path: Any, correction: str, loss: str, level: str, beta: float
) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train_corrected(tmp_path, correction, trainer_class=Compared, **settings)
    assert len(trainer.gradient_errors) == 3
    assert session.totals.counters["replaced"] == 4


@pytest.mark.parametrize(
    ("scale", "signals"), [("none", {-0.4, -0.15, 0.6, 0.85}), ("group", {-0.77, -0.4, 0.97, 1.6})]
)
def test_its_number_is_in_the_units_of_the_advantages_in_force(tmp_path: Any, scale: str, signals: set[float]) -> None:
    """Of one and of two right among four: r − 1/4 and r − 1/2, over 1/2 and 0.577 where they are scaled."""
    trainer, _ = train_corrected(tmp_path, "asymre", scale_rewards=scale, max_completion_length=5)
    found = [loss["inputs"] for loss in trainer.losses]
    replayed = [value for inputs in found for value in inputs["advantages"][inputs.rows[:, 0] < 0].tolist()]
    assert {round(value, 2) for value in replayed} <= {*signals, *(round(0.2 - signal, 2) for signal in signals)}
    assert len(replayed) == 16


@pytest.mark.parametrize("delta", [float("nan"), float("inf"), "0.1", None])
def test_a_delta_that_can_not_be_used_is_named(delta: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"asymre: delta={delta!r} can't be used"):
        make_asymre(delta)
