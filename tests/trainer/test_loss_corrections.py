"""Every correction × loss type × importance level: the trainer's loss equals one computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corrected import CORRECTIONS, SCRIPT, allowed, check_by_hand, train
from support import DEAD, HALF, LIVE, Forwards, Rewards, Spy, record

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_trainer


@pytest.mark.parametrize(("correction", "loss", "level", "beta"), allowed(CORRECTIONS, [0.0, 0.1]))
def test_the_trainers_loss_is_the_one_computed_by_hand(
    tmp_path: Any, correction: str, loss: str, level: str, beta: float
) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train(tmp_path, correction, **settings)
    assert session.totals.counters["replaced"] == 4
    assert check_by_hand(trainer, correction) == 16


@pytest.mark.parametrize(("correction", "loss", "level", "beta"), allowed(["per"], [0.0, 0.1]))
def test_per_is_the_one_computed_by_hand(tmp_path: Any, correction: str, loss: str, level: str, beta: float) -> None:
    """Scores are sum |A| × std: 1.5 with one or three of four right, 2 with two, which so weigh (4/3)^-β."""
    replay = {"replay_sampler": "proportional", "replay_correction_kwargs": {"beta": 0.5, "final_beta": 0.5}}
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train(tmp_path, correction, replay, **settings)
    assert session.totals.counters["replaced"] == 4
    assert check_by_hand(trainer, correction) == 16


def test_per_weighs_against_the_samplers_preferences(tmp_path: Any) -> None:
    """An entry of twice the score is drawn twice as often, and so weighs 2^-β, with β on its way from 0.5 to 1."""
    script = Rewards([LIVE, [2.0, 0, 0, 0], [4.0, 0, 0, 0]], [DEAD, DEAD, DEAD])
    trainer = make_trainer(tmp_path, script, trainer_class=Spy, max_steps=4, learning_rate=1e-3, scale_rewards="none")
    session = trl_replay.attach(
        trainer,
        replay_scorer="reward_std",
        replay_sampler="proportional",
        replay_correction="per",
        replay_correction_kwargs={"beta": 0.5, "updates": 4},
    )
    steps = record(session)
    trainer.train()
    assert session.totals.counters["replaced"] == 9
    for update, (loss, (_, after)) in enumerate(zip(trainer.losses, steps, strict=True)):
        beta, weights = 0.5 + 0.5 * update / 4, []
        for signal in after["advantages"].view(3, 4).amax(dim=1).tolist():  # 3/4 of the group's one reward
            weights += [1.0 if update == 0 else (signal / 0.75) ** -beta] * 4
        expected = torch.tensor(weights) * after["advantages"]
        torch.testing.assert_close(loss["inputs"]["advantages"].sort().values, expected.sort().values)


def test_per_takes_a_third_partys_weighted_sampler(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4)
    sampler = trl_replay.WeightedSampler(lambda table, context: 1.0 / (1 + table.uses))
    session = trl_replay.attach(trainer, replay_correction="per", replay_sampler=sampler)
    trainer.train()
    assert session.totals.counters["replaced"] > 0


def test_decoupled_keeps_the_policy_of_the_first_forward_as_the_proximal_one(tmp_path: Any) -> None:
    """With two iterations, the second update's proximal policy is the first one's, not the trained one."""
    trainer, _ = train(tmp_path, "decoupled", num_iterations=2, max_steps=6)
    pairs = []
    for first, second in zip(trainer.losses[::2], trainer.losses[1::2], strict=False):
        replayed = first["inputs"].rows[:, 0] < 0
        if replayed.any():
            mask = first["inputs"]["completion_mask"][replayed].bool()
            pairs.append((first["logps"][replayed][mask], second["inputs"]["old_per_token_logps"][replayed][mask]))
            assert not torch.equal(second["logps"][replayed][mask], pairs[-1][0]), "the policy has moved in between"
    assert pairs
    for proximal, old in pairs:
        assert torch.equal(proximal, old)


@pytest.mark.parametrize("correction", [*CORRECTIONS, "m2po"])
def test_no_correction_adds_a_forward(tmp_path: Any, correction: str) -> None:
    counts = []
    for attach in (False, True):
        trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, max_completion_length=4, learning_rate=0.0)
        forwards = Forwards(trainer.model)
        if attach:
            session = trl_replay.attach(trainer, replay_correction=correction)
        trainer.train()
        counts.append(forwards.counts)
    assert session.totals.counters["replaced"] > 0
    assert counts[0] == counts[1]


def test_a_weight_of_zero_takes_the_rows_kl_away_too(tmp_path: Any) -> None:
    """With weight 0 the gradient is that of the fresh rows alone, though beta is not 0 and the policy has moved."""
    gradients = []
    for correction in ("ratio", "nothing"):

        def nothing(rows: Any, context: Any) -> Any:
            return trl_replay.Corrected(rows.behaviour_logps, torch.zeros_like(rows.advantages))

        trainer = make_trainer(
            tmp_path / correction, Rewards([LIVE, HALF, LIVE], [DEAD, DEAD, DEAD]), trainer_class=Spy, max_steps=2,
            learning_rate=5e-2, beta=0.5, loss_type="grpo",
        )  # fmt: skip
        trl_replay.attach(trainer, replay_correction="ratio" if correction == "ratio" else nothing)
        trainer.train()
        gradients.append([log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log][-1])
    assert gradients[0] > 1e-3
    assert gradients[1] == pytest.approx(0.0, abs=1e-6)


def test_replay_weight_scales_the_replayed_rows_only(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, max_steps=4)
    session = trl_replay.attach(trainer, replay_weight=0.25)
    steps = record(session)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    for loss, (_, after) in zip(trainer.losses, steps, strict=True):
        replayed = after[ROWS][:, 0] < 0
        weighted = torch.where(replayed, 0.25, 1.0) * after["advantages"]
        torch.testing.assert_close(loss["inputs"]["advantages"].sort().values, weighted.sort().values)
