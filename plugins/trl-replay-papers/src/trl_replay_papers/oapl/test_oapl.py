"""OAPL: loss and gradient by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corrected import allowed
from replaying import Checked, train_corrected

from trl_replay import ConfigurationError, ReplayedRows
from trl_replay.testing import make_context
from trl_replay_papers.oapl import make_oapl


class Compared(Checked):
    """Gradients too."""

    gradients = True


@pytest.mark.parametrize(("correction", "loss", "level", "beta"), allowed(["oapl"], [0.1]))
def test_loss_and_gradient_are_those_by_hand(
    tmp_path: Any, correction: str, loss: str, level: str, beta: float
) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train_corrected(tmp_path, correction, trainer_class=Compared, **settings)
    assert len(trainer.gradient_errors) == 3
    assert session.totals.counters["replaced"] == 4


def test_the_gradient_is_that_of_the_regression() -> None:
    """Of −(β Σ log r − A)² / 2β, for each row; the token that is not trained has no part in it."""
    behavior = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -9.0]])
    logps = torch.tensor([[-0.8, -2.5, -0.4], [-1.1, -0.6, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages = torch.tensor([0.75, -0.25])
    sums = ((logps - behavior) * mask).sum(dim=1)
    regression = ((0.2 * sums - advantages) ** 2).sum() / 0.4
    (expected,) = torch.autograd.grad(regression, logps)
    now = logps.detach()
    seen = torch.where(mask, behavior, now)
    rows = ReplayedRows(now, seen, now, mask, advantages, torch.ones(2, dtype=torch.int64))
    corrected = make_oapl(beta=0.2)(rows, make_context())
    assert corrected.old_logps is rows.logps
    assert corrected.weights is None
    on_policy = -((advantages + corrected.shift).unsqueeze(1) * mask)
    torch.testing.assert_close(on_policy, expected)


@pytest.mark.parametrize("beta", [0, -1.0, float("nan"), None])
def test_a_beta_that_can_not_be_used_is_named(beta: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"oapl: beta={beta!r} can't be used: give a finite number above 0"):
        make_oapl(beta)
