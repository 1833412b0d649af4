"""Every correction × loss type × importance level: the trainer's loss equals one computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_loss import Row, reference_loss
from support import DEAD, HALF, LIVE, Rewards, Spy, record
from test_idle import Forwards

import trl_replay
from trl_replay import ReplayedRows
from trl_replay.loss.tap import ROWS
from trl_replay.registry import registry
from trl_replay.testing import make_context, make_trainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "sapo", "luspo"]
SCRIPT = ([LIVE, HALF, [1, 1, 1, 0.0]], [DEAD, LIVE, DEAD])


def weights_by_hand(name: str, new: torch.Tensor, behaviour: torch.Tensor, advantage: float) -> tuple[Any, Any]:
    """`(old, weights)` of one replayed row's tokens; m2po is over all rows and done in its own test."""
    r = (new - behaviour).double().exp()
    one = torch.ones_like(r)
    if name == "ratio":
        return behaviour, one
    if name == "none":
        return new, one
    if name == "per":
        std = 3**-0.5  # of two right among four; TRL divides by 1e-4 more than it, and than the others' 0.5
        chance = (2 * std / (std + 1e-4)) / (1.5 * 0.5 / (0.5 + 1e-4))
        return behaviour, one * (chance**-0.5 if 0.8 < abs(advantage) < 0.9 else 1.0)
    if name == "truncated":
        return new, torch.minimum(r, one * 2.0)
    if name == "sequence_mask":
        mean = math.exp(float((new - behaviour).double().mean()))
        return behaviour, one * (0.5 <= mean <= 2.0)
    if name == "topr":
        return new, one if advantage >= 0 else one * min(float(r.prod()), 1.0)
    if name == "decoupled":
        return new, torch.minimum(r, one * 2.0)
    assert name == "shaped"
    return new, 0.1 * r / (r + 0.1) ** 2


CORRECTIONS = ["ratio", "none", "truncated", "sequence_mask", "topr", "decoupled", "shaped"]
TOKEN_WEIGHTS = {"truncated", "m2po", "decoupled", "shaped"}


Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the new, behaviour and old log-probs of a row's tokens and their weights to other weights."""


def train(
    tmp_path: Any, correction: str, replay: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, trl_replay.Session]:
    settings = {"max_steps": 3, "learning_rate": 2e-2, "max_completion_length": 5, **settings}
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, **settings)
    trainer.signals = {}
    session = trl_replay.attach(
        trainer, **{"replay_correction": correction, "replay_sampler": "newest"} | (replay or {})
    )
    trainer.train()
    return trainer, session


def check_by_hand(trainer: Any, correction: str, gate: Gate | None = None) -> int:
    """Compares every loss with the reference; returns how many replayed rows were in them."""
    replayed = 0
    stored: dict[str, torch.Tensor] = {}
    for loss in trainer.losses:
        inputs, logps = loss["inputs"], loss["logps"]
        mask = inputs["completion_mask"].bool()
        rows = []
        for index, number in enumerate(inputs.rows[:, 0].tolist()):
            key = str(
                (inputs["prompt_ids"][index].tolist()[-2:], inputs["completion_ids"][index][mask[index]].tolist())
            )
            new = logps[index][mask[index]]
            advantage = (
                float(trainer.signals[key]) if number < 0 else float(inputs["advantages"].view(12, -1)[index, 0])
            )
            old, weights = new, torch.ones_like(new)
            if number < 0:
                old, weights = weights_by_hand(correction, new, stored[key], advantage)
                weights = gate(new, stored[key], old, weights) if gate else weights
                replayed += 1
            else:
                stored[key] = new
                trainer.signals[key] = advantage
            ref = inputs["ref_per_token_logps"][index][mask[index]] if "ref_per_token_logps" in inputs else None
            rows.append(Row(new, old, advantage, weights, ref))
        expected = reference_loss(rows, trainer.args, 5)
        assert float(loss["loss"]) == pytest.approx(expected, rel=2e-4, abs=2e-6)
    return replayed


ALLOWED = [
    (correction, loss, level, beta)
    for correction in CORRECTIONS
    for loss in LOSSES
    for level in ("token", "sequence")
    for beta in (0.0, 0.1)
    if level == "token" or correction not in TOKEN_WEIGHTS or loss == "cispo"
]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_trainers_loss_is_the_one_computed_by_hand(tmp_path: Any, correction: str, loss: str) -> None:
    for _, _, level, beta in [case for case in ALLOWED if case[:2] == (correction, loss)]:
        settings = {"beta": beta} if beta else {}
        trainer, session = train(
            tmp_path / f"{level}{beta}", correction, loss_type=loss, importance_sampling_level=level, **settings
        )
        assert session.totals.counters["replaced"] == 4
        assert check_by_hand(trainer, correction) == 16, (level, beta)


REFUSED = [(correction, loss) for correction in sorted(TOKEN_WEIGHTS) for loss in LOSSES if loss != "cispo"]


@pytest.mark.parametrize(("correction", "loss"), REFUSED)
def test_token_weights_are_refused_by_name_where_they_are_not_exact(tmp_path: Any, correction: str, loss: str) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), loss_type=loss, importance_sampling_level="sequence")
    before = dict(trainer.__dict__)
    with pytest.raises(trl_replay.ConfigurationError, match=f"replay_correction='{correction}' weighs single tokens"):
        trl_replay.attach(trainer, replay_correction=correction)
    assert trainer.__dict__ == before


def rows_of(logs: list[list[float]], advantages: list[float], length: int = 4) -> ReplayedRows:
    """Replayed rows whose log ratios are given; the last position of each is padding."""
    ratios = torch.tensor([[*log, 0.0] for log in logs])
    behaviour = torch.full_like(ratios, -1.5)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    mask[:, -1] = False
    new = behaviour + ratios
    return ReplayedRows(new, behaviour, new, mask, torch.tensor(advantages), torch.ones(len(logs), dtype=torch.int64))


def made(name: str, **kwargs: Any) -> Any:
    return registry().resolve("correction", name, "replay_correction").make(**kwargs)


def test_m2po_masks_the_largest_log_ratios_until_their_second_moment_is_small() -> None:
    rows = rows_of([[0.1, 0.5, -0.1], [0.0, -0.9, 0.2]], [1.0, -1.0])
    corrected = made("m2po", threshold=0.02)(rows, make_context())
    # squares .01 .25 .01 / 0 .81 .04: without .81 and .25 the mean is .06 / 4 = .015
    assert corrected.weights[rows.mask].tolist() == [1, 0, 1, 1, 0, 1]
    assert torch.equal(corrected.old_logps, rows.behaviour_logps)
    everything = made("m2po", threshold=1.0)(rows, make_context())
    assert bool((everything.weights[rows.mask] == 1).all())


def test_truncated_at_sequence_level_gives_one_weight_a_row() -> None:
    rows = rows_of([[0.1, 0.2, 0.3], [-0.5, -0.5, 0.1]], [1.0, -1.0])
    corrected = made("truncated", cap=1.5, level="sequence")(rows, make_context())
    torch.testing.assert_close(corrected.weights, torch.tensor([1.5, math.exp(-0.9)]))


def test_huge_ratios_stay_finite() -> None:
    rows = rows_of([[200.0, -300.0, 90.0], [-500.0, -500.0, -500.0]], [1.0, -1.0])
    for name in [*CORRECTIONS, "m2po"]:
        corrected = made(name)(rows, make_context())
        assert corrected.weights is None or bool(corrected.weights.isfinite().all()), name


@pytest.mark.parametrize("loss", LOSSES)
def test_per_is_the_one_computed_by_hand(tmp_path: Any, loss: str) -> None:
    """Scores are sum |A| × std: 1.5 with one or three of four right, 2 with two, which so weigh (4/3)^-β."""

    replay = {"replay_sampler": "proportional", "replay_correction_kwargs": {"beta": 0.5, "final_beta": 0.5}}
    for level in ("token", "sequence"):
        for beta in (0.0, 0.1):
            trainer, session = train(
                tmp_path / f"{level}{beta}", "per", replay, loss_type=loss, importance_sampling_level=level, beta=beta
            )
            assert session.totals.counters["replaced"] == 4
            assert check_by_hand(trainer, "per") == 16


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


@pytest.mark.parametrize("sampler", ["proportional", "prompt_balanced", "uniform"])
def test_chances_are_relative_to_the_least_likely_entry(tmp_path: Any, sampler: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, HALF], [LIVE, DEAD, HALF], [DEAD] * 3), max_steps=4)
    session = trl_replay.attach(trainer, replay_sampler=sampler, replay_correction="per")
    seen = []
    draw = session.decide.sample

    def sample(*args: Any) -> Any:
        table = session.buffer.table
        chances = {"uniform": table.score * 0 + 1, "proportional": table.score}.get(sampler, table.score / table.peers)
        drawn = draw(*args)
        seen.extend(
            (chances[row] / chances.min(), priority)
            for row, priority in zip(drawn.rows, drawn.priorities, strict=True)
        )
        return drawn

    session.decide.sample = sample  # type: ignore[method-assign]
    trainer.train()
    assert len(seen) == 7
    assert [priority for _, priority in seen] == pytest.approx([chance for chance, _ in seen])
    assert sampler == "uniform" or max(chance for chance, _ in seen) > 1


def own_sampler(table: Any, count: int, context: Any) -> Any:
    return list(range(count))


@pytest.mark.parametrize("sampler", ["top", "newest", own_sampler])
def test_per_refuses_a_sampler_that_does_not_tell_its_chances(tmp_path: Any, sampler: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    with pytest.raises(trl_replay.ConfigurationError, match=r"needs the chances.*is no WeightedSampler.*proportional"):
        trl_replay.attach(trainer, replay_correction="per", replay_sampler=sampler)


def test_per_takes_a_third_partys_weighted_sampler(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4)
    sampler = trl_replay.WeightedSampler(lambda table, context: 1.0 / (1 + table.uses))
    session = trl_replay.attach(trainer, replay_correction="per", replay_sampler=sampler)
    trainer.train()
    assert session.totals.counters["replaced"] > 0


class Drawer:
    @trl_replay.hookimpl
    def trl_replay_sample(self, table: Any, count: int, context: Any) -> Any:
        return list(range(count))


def test_per_refuses_a_plugin_that_draws_in_the_samplers_place(tmp_path: Any) -> None:
    trl_replay.register(Drawer(), "drawer")
    try:
        with pytest.raises(trl_replay.ConfigurationError, match="the plugin 'drawer' may draw in its place"):
            trl_replay.attach(
                make_trainer(tmp_path, Rewards(*SCRIPT)),
                replay_correction="per",
                replay_sampler="uniform",
                replay_plugins=["drawer"],
            )
    finally:
        trl_replay.unregister("drawer")


BAD = [
    ("per", {"beta": 2}, "beta=2"),
    ("per", {"final_beta": -0.1}, "final_beta=-0.1"),
    ("per", {"updates": 0}, "updates=0"),
    ("truncated", {"cap": 0}, "cap=0"),
    ("truncated", {"level": "row"}, "level='row'"),
    ("sequence_mask", {"low": 2.0, "high": 1.0}, "high=1.0"),
    ("topr", {"cap": float("inf")}, "cap=inf"),
    ("m2po", {"threshold": -1}, "threshold=-1"),
    ("decoupled", {"cap": True}, "cap=True"),
    ("shaped", {"gamma": 0.0}, "gamma=0.0"),
]


@pytest.mark.parametrize(("name", "kwargs", "words"), BAD)
def test_a_bad_argument_is_refused_by_name(name: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match=words):
        made(name, **kwargs)


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
