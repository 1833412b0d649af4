"""Each correction in the trainer's loss, which equals one computed by hand.

A correction gives old log-probs and weights, and the loss sees nothing else of it. So one of each form goes through
every loss type, importance level and beta, and those of the same form through two losses: what they give is their own,
what the loss makes of it is not. Those of trl-replay-papers have tests there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from corrected import CORRECTIONS, MASKED, PROXIMAL, TWO_LOSSES, allowed
from replaying import CORRECTED as SCRIPT
from replaying import replayed_signal, train_corrected
from support import DEAD, LIVE, Rewards, Spy, record

import trl_replay
from trl_replay.registry import registry
from trl_replay.testing import make_trainer

FORMS = {
    "ratio": [],  # the behavior log-probs
    "sequence_mask": ["per"],  # and a weight for each row
    MASKED: [],  # and a weight for each token
    "topr": ["none", "imitation"],  # the current log-probs and a weight for each row
    "truncated": [PROXIMAL],  # and a weight for each token
}
"""Of each form the correction that goes through every loss, and those that go through two."""
OTHERS = [other for others in FORMS.values() for other in others]


def test_every_correction_has_its_form() -> None:
    offers = registry().strategies("correction")
    known = {spec.name for plugin, spec in offers if plugin.name == "builtin"}
    assert known == {*FORMS, *OTHERS} - {MASKED, PROXIMAL} == {*CORRECTIONS, "per"}


PER = {"replay_sampler": "proportional", "replay_correction_kwargs": {"beta": 0.5, "final_beta": 0.5}}
"""Scores are sum |A| × std: 1.5 with one or three of four right, 2 with two, which so weigh (4/3)^-0.5."""


@pytest.mark.parametrize(
    ("correction", "loss", "level", "beta"), [*allowed([*FORMS], [0.0, 0.1]), *allowed(OTHERS, [0.1], TWO_LOSSES)]
)
def test_the_trainers_loss_is_the_one_computed_by_hand(
    tmp_path: Any, correction: str, loss: str, level: str, beta: float
) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
    trainer, session = train_corrected(tmp_path, correction, PER if correction == "per" else None, **settings)
    assert session.totals.counters["replaced"] == 4
    if correction == MASKED:
        kept = replayed_signal(trainer).ne(0)
        assert 0 < int(kept.sum()) < len(kept), "the limits are such that some is masked and some is not"


@pytest.mark.parametrize(("correction", "limit"), [("truncated", None), ("ratio", 1.05)])
def test_76_as_many_rows_as_tokens_are_no_advantages_of_tokens(
    tmp_path: Any, correction: str, limit: float | None
) -> None:
    """12 rows of 12 tokens, and a weight for each token."""
    settings = {} if limit is None else {"replay_max_weight": limit}
    trainer, session = train_corrected(tmp_path, correction, settings, by_hand=limit is None, max_completion_length=12)
    assert {loss["inputs"]["completion_ids"].shape for loss in trainer.losses} == {(12, 12)}
    assert session.totals.counters["replaced"] == 4


def test_a_mask_that_keeps_nothing_leaves_the_fresh_rows_alone(tmp_path: Any) -> None:
    limits = {"replay_correction_kwargs": {"low": 1e5, "high": 1e6}}
    trainer, _ = train_corrected(tmp_path, "sequence_mask", limits, by_hand=False, beta=0.1)
    signal = replayed_signal(trainer)
    assert len(signal) > 16
    assert not bool(signal.any())
    gated = [log["replay/gated_fraction"] for log in trainer.state.log_history if "replay/gated_fraction" in log]
    assert set(gated) == {1}, "the share of rows of which nothing is left"


class MasksTheLastRow:
    @trl_replay.hookimpl
    def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
        return np.where(np.arange(4) == 3, np.nan, groups.advantages)


def test_a_shift_moves_an_advantage_of_0_and_no_masked_row(tmp_path: Any, plug: Any) -> None:
    script = Rewards([[1.0, 0.5, 0.0, 0.5]] * 3, [DEAD] * 3)
    trainer = make_trainer(tmp_path, script, trainer_class=Spy, max_steps=3, scale_rewards="none")
    shift = functools.partial(shifted_by, 0.1)
    trl_replay.attach(trainer, replay_correction=shift, replay_start=0, replay_plugins=plug(MasksTheLastRow()))
    trainer.train()
    fresh, *later = [loss["inputs"]["advantages"].sort().values for loss in trainer.losses]
    torch.testing.assert_close(fresh, torch.tensor([-0.5, 0.0, 0.0, 0.5]).repeat_interleave(3))
    assert len(later) == 2
    for advantages in later:
        torch.testing.assert_close(advantages, torch.tensor([-0.4, 0.0, 0.1, 0.6]).repeat_interleave(3))


def shifted_by(amount: float, rows: Any, context: Any) -> Any:
    return trl_replay.Corrected(rows.logps, shift=torch.full((len(rows.ages),), amount))


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


def test_the_proximal_policy_is_that_of_the_first_forward(tmp_path: Any) -> None:
    """With two iterations, the second update's proximal policy is the first one's, not the trained one."""
    trainer, _ = train_corrected(tmp_path, PROXIMAL, by_hand=False, num_iterations=2, max_steps=6)
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
