"""Gates inside the loss: what each lets through, against losses computed by hand, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DEAD, HALF, LIVE, LOSSES, Rewards, Spy, record
from test_corrections import SCRIPT, TOKEN_WEIGHTS, check_by_hand, train
from test_idle import Forwards

import trl_replay
from trl_replay.buffer.rate_limiter import RateLimiter
from trl_replay.loss.gates import Gates
from trl_replay.loss.tap import ROWS
from trl_replay.testing import make_groups, make_trainer

LIMIT = 0.05
"""Between the mean |log ratio| of some replayed rows and of others, in the runs below."""


def logged(trainer: Any, key: str) -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


def near(new: Any, behaviour: Any, old: Any, weights: Any) -> Any:
    return weights * float((new - behaviour).abs().mean() <= LIMIT)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_beyond_the_limit_trains_nothing_and_loses_its_kl(tmp_path: Any, loss: str) -> None:
    for correction in ("ratio", "truncated"):
        for level in ("token", "sequence"):
            for beta in (0.0, 0.3):
                if level == "sequence" and correction in TOKEN_WEIGHTS and loss != "cispo":
                    continue
                trainer, _ = train(
                    tmp_path / f"{correction}{level}{beta}", correction, {"replay_max_log_ratio": LIMIT},
                    loss_type=loss, importance_sampling_level=level, beta=beta,
                )  # fmt: skip
                assert check_by_hand(trainer, correction, near) >= 8
                gated = logged(trainer, "replay/gated_fraction")
                assert any(share > 0 for share in gated), "the limit is of use in this run"


@pytest.mark.parametrize("loss", ["grpo", "sapo"])
def test_a_gated_row_whose_ratio_overflows_leaves_everything_finite(tmp_path: Any, loss: str) -> None:
    trainer = make_trainer(
        tmp_path, Rewards(*SCRIPT), trainer_class=Spy, max_steps=3, loss_type=loss, beta=0.3, learning_rate=1e-2
    )
    session = trl_replay.attach(trainer, replay_max_log_ratio=1.0)
    load = session.buffer.load

    def far_off(serial: int) -> Any:
        group = load(serial)
        group.tensors["old_per_token_logps"] -= 200.0
        return group

    session.buffer.load = far_off  # type: ignore[method-assign]
    trainer.train()
    assert logged(trainer, "replay/gated_fraction")[-1] == 1.0
    assert all(bool(seen["loss"].isfinite()) for seen in trainer.losses)
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_a_gated_row_loses_the_gradient_of_its_entropy_too(tmp_path: Any) -> None:
    """With nothing but gated rows in the batch there is no gradient left."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), max_steps=2, learning_rate=2e-2, beta=0.3, entropy_coef=0.1
    )
    trl_replay.attach(trainer, replay_max_log_ratio=1e-9)
    trainer.train()
    assert logged(trainer, "replay/gated_fraction") == [1.0]
    assert logged(trainer, "grad_norm")[1] == 0.0


def test_an_entry_that_drifted_leaves_and_is_counted(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD] * 3), max_steps=6, learning_rate=5e-2)
    session = trl_replay.attach(trainer, replay_max_log_ratio=0.01)
    steps = record(session)
    trainer.train()
    assert [int((after[ROWS][:, 0] < 0).sum()) for _, after in steps] == [0, 4, 0, 0, 0, 0]
    assert len(session.buffer) == 0
    assert session.totals.counters["retired"] == 1
    assert "an entry left: its mean |log ratio| passed replay_max_log_ratio" in session.explain()
    assert logged(trainer, "replay/retired") == [0, 0, 1, 0, 0, 0]


def test_the_tables_drift_is_the_groups_mean_log_ratio(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD] * 3), trainer_class=Spy, max_steps=3, learning_rate=2e-2
    )
    session = trl_replay.attach(trainer)
    trainer.train()
    last = trainer.losses[-1]
    replayed = last["inputs"].rows[:, 0] < 0
    mask = last["inputs"]["completion_mask"][replayed].bool()
    new, old = last["logps"][replayed][mask], last["inputs"]["old_per_token_logps"][replayed][mask]
    assert float(session.buffer.table.drift[0]) == pytest.approx(float((new - old).abs().mean()), rel=1e-5)
    assert session.metrics["replay/drift_mean"] == pytest.approx(float(session.buffer.table.drift[0]), rel=1e-5)
    assert float(session.buffer.table.drift[0]) > 0


CAP = 1.02


def capped(level: str) -> Any:
    def cap(new: Any, behaviour: Any, old: Any, weights: Any) -> Any:
        logs = (new - old).double()
        total = weights * (logs if level == "token" else logs.mean()).exp()
        return weights * torch.where(total > CAP, CAP / total, 1.0)

    return cap


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_cap_bounds_ratio_times_weight(tmp_path: Any, loss: str) -> None:
    for correction in ("ratio", "truncated", "topr"):
        for level in ("token", "sequence"):
            if level == "sequence" and correction in TOKEN_WEIGHTS and loss != "cispo":
                continue
            trainer, _ = train(
                tmp_path / f"{correction}{level}", correction, {"replay_max_weight": CAP}, loss_type=loss,
                importance_sampling_level=level, beta=0.1,
            )  # fmt: skip
            assert check_by_hand(trainer, correction, capped(level)) == 16
            shares = logged(trainer, "replay/capped_fraction")
            assert all(0 <= share <= 1 for share in shares)
            assert correction == "topr" or any(share > 0 for share in shares)


def test_gates_act_together(tmp_path: Any) -> None:
    logs = torch.tensor([[0.5, -0.1], [0.0, 0.0], [3.0, 3.0]])
    rows = trl_replay.ReplayedRows(
        logs, torch.zeros(3, 2), logs, torch.ones(3, 2, dtype=torch.bool), torch.ones(3), torch.ones(3)
    )
    gates = Gates(weight=0.5, max_weight=0.75, max_log_ratio=1.0)
    corrected = gates(rows, trl_replay.Corrected(rows.behaviour_logps))
    torch.testing.assert_close(corrected.weights, torch.tensor([[0.75 / 1.6487213, 0.5], [0.5, 0.5], [0.0, 0.0]]))
    assert gates.metrics() == {"replay/capped_fraction": 0.5}
    assert gates.metrics() == {}


def test_without_gates_what_the_correction_gave_passes_as_it_is() -> None:
    given = trl_replay.Corrected(torch.zeros(1, 2))
    assert Gates()(None, given) is given  # type: ignore[arg-type]


def test_less_is_replayed_while_the_effective_sample_size_is_below_the_floor(tmp_path: Any) -> None:
    script = [LIVE] * 4, [DEAD] * 4
    counts, shares = {}, {}
    for floor in (None, 0.0, 1.0):
        trainer = make_trainer(
            tmp_path / str(floor), Rewards(*script), max_steps=7, learning_rate=1e-2, per_device_train_batch_size=16
        )
        session = trl_replay.attach(trainer, replay_min_ess=floor)
        steps = record(session)
        trainer.train()
        counts[floor] = [int((after[ROWS][:, 0] < 0).sum()) // 4 for _, after in steps]
        shares[floor] = session.components.rate_limiter.fraction
    assert counts[None] == counts[0.0] == [0, 4, 4, 4, 4, 4, 4]
    assert counts[1.0] == [0, 4, 2, 1, 1, 1, 1], "one group is always left, or nothing would be measured again"
    assert shares == {None: 1.0, 0.0: 1.0, 1.0: 0.125}, "no less than half of what one group is"
    assert "replay_min_ess allows 1 of 4 groups" in session.explain()


def test_the_floor_lets_go_again() -> None:
    """However long it was below: it never gets further down than one group."""
    limiter = RateLimiter(trl_replay.ReplayConfig(replay_min_ess=0.5), 64)
    fresh = make_groups([LIVE] * 16)
    most = []
    for share in (0.4, 0.4, 0.4, 0.6, 0.5, None, 0.9, *[0.1] * 1100, *[0.9] * 4):
        limiter.measured(share)
        limiter.observe(fresh)
        most.append(limiter.slots_allowed(16, 10)[0])
    assert most[:7] == [8, 4, 2, 4, 8, 8, 16]
    assert most[7:12] == [8, 4, 2, 1, 1]
    assert most[-5:] == [1, 2, 4, 8, 16]


GATES: list[dict[str, Any]] = [
    {"replay_max_log_ratio": 0.05},
    {"replay_max_weight": 1.01},
    {"replay_min_ess": 0.99},
    {"replay_refresh": "advantage"},
    {"replay_correction": "per", "replay_sampler": "proportional"},
    {"replay_unfilled": "mask"},
    {"replay_unfilled": "exclude"},
    {"replay_unfilled": "intra_batch"},
]


@pytest.mark.parametrize("settings", GATES, ids=str)
def test_no_gate_adds_a_forward(tmp_path: Any, settings: dict[str, Any]) -> None:
    counts = []
    for attach in (False, True):
        trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, max_completion_length=4, learning_rate=0.0)
        forwards = Forwards(trainer.model)
        if attach:
            session = trl_replay.attach(trainer, **settings)
        trainer.train()
        counts.append(forwards.counts)
    assert session.totals.counters["replaced"] > 0
    assert counts[0] == counts[1]


def test_all_gates_open_is_as_without_gates(tmp_path: Any) -> None:
    losses = []
    opened = {"replay_max_log_ratio": 1e6, "replay_max_weight": 1e6, "replay_min_ess": 0.0, "replay_start": 0}
    for settings in ({}, opened):
        trainer = make_trainer(
            tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, LIVE, DEAD]), trainer_class=Spy, max_steps=5
        )
        trl_replay.attach(trainer, **settings)
        trainer.train()
        losses.append([float(loss["loss"]) for loss in trainer.losses])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"replay_unfilled": "mask"},
        {"replay_unfilled": "exclude"},
        {"replay_weight": 0.5},
        {"replay_max_weight": 2.0},
        {"replay_max_log_ratio": 0.5},
        {"replay_min_ess": 0.5},
        {"replay_refresh": "ratio"},
    ],
    ids=str,
)
def test_what_acts_inside_the_log_prob_method_is_refused_where_a_loss_goes_around_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("trl_replay.compat.has_other_loss_path", lambda trainer: True)  # TRL up to 1.13, Liger
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    before = dict(trainer.__dict__)
    ((name, value),) = settings.items()
    with pytest.raises(
        trl_replay.RefusedError, match=f"{name}={value!r} acts inside .*use_liger_kernel=True goes around"
    ):
        trl_replay.attach(trainer, **settings)
    assert trainer.__dict__ == before
