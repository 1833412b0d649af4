"""The Liger loss of TRL up to 1.13: it goes around the tap, and gets one forward a batch for old log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replaying import Watch, check_batches
from support import DEAD, HALF, LIVE, Rewards, Spy
from trl import GRPOTrainer

import trl_replay
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.skipif(
    not hasattr(GRPOTrainer, "compute_liger_loss"),
    reason="TRL 1.14 took this loss out; `make compat` runs these tests",
)
SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])


class StandIn:
    """In the place of liger-kernel's fused loss, behind the trainer's own `compute_liger_loss`: plain GRPO."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, _input: Any, lin_weight: Any, selected_token_ids: Any, attention_mask: Any, advantages: Any, **given: Any
    ) -> Any:
        logps = torch.log_softmax((_input @ lin_weight.T).float(), dim=-1)
        logps = logps.gather(-1, selected_token_ids.unsqueeze(-1)).squeeze(-1)
        old = given["old_per_token_logps"]
        old = logps.detach() if old is None else old
        ratio = (logps - old).exp()
        gained = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantages.unsqueeze(1)
        self.calls.append({"ids": selected_token_ids, "mask": attention_mask, "logps": logps.detach(), **given})
        return -(gained * attention_mask).sum() / attention_mask.sum(), [torch.zeros(())]


def with_liger(tmp_path: Any, rewards: Any, **settings: Any) -> tuple[Any, StandIn]:
    from trl.models.utils import _ForwardRedirection

    trainer, loss = make_trainer(tmp_path, rewards, trainer_class=Spy, max_steps=5, **settings), StandIn()
    trainer.use_liger_kernel, trainer._forward_redirection = True, _ForwardRedirection()
    trainer.liger_loss = trainer.liger_grpo_loss = loss  # the name has changed
    return trainer, loss


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}, {"num_iterations": 2}], ids=str)
def test_replay_is_right_with_the_liger_loss(tmp_path: Any, settings: dict[str, Any]) -> None:
    trainer, loss = with_liger(tmp_path, Rewards(*SCRIPT), learning_rate=3e-2, **settings)
    session = trl_replay.attach(trainer)
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    check_batches(watch)
    assert all("old_per_token_logps" in before for before, _ in watch.steps)
    moved = 0.0
    for call, (_, after) in zip(loss.calls[:: settings.get("num_iterations", 1)], watch.steps, strict=True):
        stored = {str(ids.tolist()): row for ids, row in zip(after["completion_ids"], range(12), strict=True)}
        for number, ids in enumerate(call["ids"]):
            row, mask = stored[str(ids.tolist())], call["mask"][number].bool()
            torch.testing.assert_close(
                call["old_per_token_logps"][number][mask], after["old_per_token_logps"][row][mask], rtol=0, atol=0
            )
            gap = (call["logps"][number] - call["old_per_token_logps"][number])[mask].abs().max()
            replayed = int(after["trl_replay_rows"][row, 0]) < 0
            assert replayed or float(gap) < 1e-5, "a fresh row's ratio is 1"
            moved = max(moved, float(gap)) if replayed else moved
    assert moved > 1e-3, "a replayed row's ratio is not 1"


def test_detach_takes_the_liger_loss_off_too(tmp_path: Any) -> None:
    trainer, _ = with_liger(tmp_path, Rewards(*SCRIPT))
    before = dict(trainer.__dict__)
    trl_replay.attach(trainer)
    assert "compute_liger_loss" in trainer.__dict__
    trl_replay.detach(trainer)
    assert trainer.__dict__.keys() == before.keys()
