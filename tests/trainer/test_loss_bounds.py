"""Defects that an attack found in the loss and in what reaches it, by number; each through a real GRPOTrainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hn
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from releases import since
from support import DEAD, HALF, LIVE, LOSSES, Rewards, Spy, record
from transformers import TrainerCallback

import trl_replay
from trl_replay import compat
from trl_replay.loss.bounds import Bounds
from trl_replay.loss.tap import ROWS
from trl_replay.registry import registry
from trl_replay.table import COLUMNS
from trl_replay.testing import make_trainer

MASKS = ["geo_mask", "k3_mask", "outlier_mask", "veto_negative", "icepop"]
CORRECTIONS = ["ratio", "none", "truncated", "sequence_mask", "topr", "m2po", "decoupled", "shaped", "per", *MASKS]
TOKEN_WEIGHTS = {"truncated", "m2po", "icepop", "decoupled", "shaped"}


class Sharpen(TrainerCallback):
    """After the first update the policy becomes all but deterministic, as many updates would make it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                kwargs["model"].lm_head.weight.mul_(self.factor)


@pytest.mark.parametrize(
    "settings",
    [{}, {"replay_max_weight": 2.0}, {"replay_correction": "truncated"}, {"replay_correction": "none"}],
    ids=str,
)
def test_37_a_policy_that_left_the_stored_tokens_behind_ruins_no_weight(
    tmp_path: Any, settings: dict[str, Any]
) -> None:
    """The reference finds a replayed token e^88 times as likely as the policy does: exp(88) times a ratio of 0."""
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), max_steps=3, beta=0.04)
    trainer.add_callback(Sharpen(300.0))
    session = trl_replay.attach(trainer, **settings)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert all(np.isfinite(norm) for norm in norms)
    dropped = [log["replay/kl_dropped_fraction"] for log in trainer.state.log_history if "replay/ess" in log]
    assert all(0 < share <= 1 for share in dropped), "what was dropped is counted"


def test_37_the_share_of_dropped_kl_is_logged_only_with_a_reference_and_is_0_where_nothing_is_far_off(
    tmp_path: Any,
) -> None:
    for beta in (0.0, 0.1):
        trainer = make_trainer(tmp_path / str(beta), Rewards([LIVE] * 3, [DEAD] * 3), max_steps=3, beta=beta)
        trl_replay.attach(trainer)
        trainer.train()
        shares = [log.get("replay/kl_dropped_fraction") for log in trainer.state.log_history if "replay/ess" in log]
        assert shares == ([0.0, 0.0] if beta else [None, None])


class Scripted(Spy):
    """The stock trainer, whose loss is given log-probs instead of the model's."""

    given: Any = None
    others: tuple[Any, ...] = ()

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.given is None:
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            self.others = (torch.zeros(()), *result[2:])
            return result
        return self.given, torch.zeros_like(self.given), *self.others[1:]


class LateBinding:
    """The correction that a test names last."""

    def __init__(self) -> None:
        self.name = "ratio"
        self.made = {name: registry().resolve("correction", name).make() for name in CORRECTIONS}

    def __call__(self, rows: Any, context: Any) -> Any:
        return self.made[self.name](rows, context)


class Loss:
    """The stock loss of one real micro-batch with replayed and fresh rows, for any log-probs."""

    def __init__(self, folder: Any, **settings: Any) -> None:
        script = Rewards([LIVE, HALF, [1, 1, 1, 0.0]], [DEAD, LIVE, DEAD])
        self.trainer = make_trainer(
            folder, script, trainer_class=Scripted, max_steps=2, beta=0.04, max_completion_length=3, **settings
        )
        self.correction = LateBinding()
        self.session = trl_replay.attach(self.trainer, replay_correction=self.correction, replay_sampler="newest")
        self.trainer.train()
        (self.micro,) = self.trainer._buffered_inputs
        self.replayed = self.micro[ROWS][:, 0] < 0
        assert int(self.replayed.sum()) == 8
        self.mask = self.micro["completion_mask"].bool()
        self.largest = float(self.micro["advantages"].abs().max())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mask.shape)

    def __call__(self, new: Any, behavior: Any, reference: Any) -> tuple[float, torch.Tensor]:
        """Loss and gradient, times the number of rows; fresh rows lie on the reference."""
        logps = torch.from_numpy(new).clone().requires_grad_()
        reference = torch.where(self.replayed.unsqueeze(1), torch.from_numpy(reference), logps.detach())
        for number, row in zip(self.micro[ROWS][:, 0].tolist(), range(len(new)), strict=True):
            if number < 0:
                placed = self.session.supply._stored([number])[0]
                placed.logps = torch.from_numpy(behavior[row, : len(placed.logps)])
                placed.proximal = None
        self.trainer.given = logps
        self.trainer.model.train()
        loss = self.trainer._compute_loss(self.trainer.model, {**self.micro, "ref_per_token_logps": reference.float()})
        loss.backward()
        return float(loss.detach()) * len(new), logps.grad * len(new)


LOG_PROBS = st.one_of(
    st.sampled_from([0.0, -1.0, -3.5, -19.0, -21.0, -60.0, -88.0, -100.0, -1e3, -1e4]),
    st.floats(-1e4, 0.0, width=32),
    st.floats(-30.0, 0.0, width=32),
)


@pytest.mark.parametrize("bias_correction", [False, True], ids=["plain KL", "bias-corrected KL"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_37_no_log_probs_of_replayed_tokens_give_a_ruinous_loss_or_gradient(
    tmp_path: Any, loss: str, level: str, bias_correction: bool
) -> None:
    """A fresh token's gradient is its advantage, and what KL to a reference it was sampled near to gives. A replayed
    token's is at most 20 times its advantage, and 440 times beta."""
    measured = Loss(tmp_path, loss_type=loss, importance_sampling_level=level, use_bias_correction_kl=bias_correction)
    allowed = [name for name in CORRECTIONS if level == "token" or loss == "cispo" or name not in TOKEN_WEIGHTS]
    arrays = hn.arrays(np.float32, measured.shape, elements=LOG_PROBS)

    @hypothesis_settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(new=arrays, behavior=arrays, reference=arrays, correction=st.sampled_from(allowed))
    def check(new: Any, behavior: Any, reference: Any, correction: str) -> None:
        measured.correction.name = correction
        value, gradient = measured(new, behavior, reference)
        assert np.isfinite(value)
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().max()) <= 1.01 * (20 * measured.largest + 0.04 * 440)
        sums = measured.shape[1] if loss == "luspo" else 1
        by_log_prob = 1.3 * 1e4 * measured.largest if loss in ("cispo", "vespo") else 0.0
        assert abs(value) <= len(new) * (sums * (20 * measured.largest + 0.04 * 440) + by_log_prob)

    check()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_37_log_ratios_of_100_leave_the_loss_and_its_gradient_finite_under_every_mask(
    tmp_path: Any, loss: str, level: str
) -> None:
    """Of all tokens, of every other one, and of both signs at once."""
    measured = Loss(tmp_path, loss_type=loss, importance_sampling_level=level)
    even = np.indices(measured.shape).sum(axis=0) % 2
    generated = np.full(measured.shape, -101, np.float32)
    for name in MASKS:
        if name in TOKEN_WEIGHTS and level == "sequence" and loss != "cispo":
            continue
        measured.correction.name = name
        for logs in (0 * even + 100, 0 * even - 100, 100 * even, -100 * even, 200 * even - 100):
            new = (generated + logs).astype(np.float32)
            value, gradient = measured(new, generated, new)
            assert np.isfinite(value), name
            assert bool(gradient.isfinite().all()), name
            assert float(gradient.abs().max()) <= 1.01 * 20 * measured.largest, name


EXTREMES = {
    "a ratio of e^60 against a negative advantage": (-1.0, -61.0, -1.0),
    "a ratio of e^60 and a KL of 30": (-31.0, -91.0, -1.0),
    "a reference e^20 times as likely": (-100.0, -100.0, -80.0),
    "a reference e^95 times as likely": (-100.0, -5.0, -5.0),
}


@pytest.mark.parametrize("case", EXTREMES.values(), ids=EXTREMES)
def test_37_the_largest_gradients_that_an_attack_found_are_bounded(
    tmp_path: Any, case: tuple[float, float, float]
) -> None:
    measured = Loss(tmp_path, loss_type="grpo", use_bias_correction_kl=False)
    value, gradient = measured(*(np.full(measured.shape, log_prob, np.float32) for log_prob in case))
    assert np.isfinite(value)
    assert float(gradient.abs().max()) <= 20 * measured.largest + 0.04 * 20


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 20.0), (torch.bfloat16, 20.0), (torch.float16, 5.545)])
def test_37_log_ratios_stay_within_half_the_log_of_a_types_largest_number(dtype: torch.dtype, limit: float) -> None:
    new = torch.tensor([[-30.0, -1.0, -1.0]], dtype=dtype)
    old = torch.tensor([[-1.0, -30.0, -1.5]])
    mask = torch.ones_like(old, dtype=torch.bool)
    rows = trl_replay.ReplayedRows(new, old, new, mask, torch.tensor([-1.0]), torch.tensor([1]))
    ratios = new.float() - Bounds()(rows, trl_replay.Corrected(old)).old_logps
    torch.testing.assert_close(ratios, torch.tensor([[-limit, math.log(20.0), 0.5]]), rtol=0.01, atol=0.01)
    summed = new.float() - Bounds(compat.LossForm(sums_ratios=True))(rows, trl_replay.Corrected(old)).old_logps
    torch.testing.assert_close(summed, torch.tensor([[-limit, limit, 0.5]]), rtol=0.01, atol=0.01)


def test_37_a_rows_ratio_is_bounded_by_moving_all_of_its_old_log_probs_alike() -> None:
    new = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
    old = torch.tensor([[-11.0, -4.0, -6.0], [-9.0, -2.0, -3.0]])  # means of log ratios: 5 and 8/3
    mask = torch.ones_like(old, dtype=torch.bool)
    rows = trl_replay.ReplayedRows(new, old, new, mask, torch.tensor([-1.0, 1.0]), torch.tensor([1, 1]))
    bounded = Bounds(compat.LossForm(sequence_level=True))(rows, trl_replay.Corrected(old)).old_logps
    assert torch.equal(bounded[1], old[1])
    torch.testing.assert_close(bounded[0] - old[0], torch.full((3,), 5 - math.log(20.0)))


class Shaped(Spy):
    """Changes the advantages of the batch, as subclasses for reward shaping do."""

    shape: Any = staticmethod(lambda advantages, rewards: advantages)
    size = 4

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self.raw = super()._calculate_rewards(*args, **kwargs)
        return self.raw

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        shaped = self.shape(batch["advantages"].view(-1, self.size), self.raw[:, 0].view(-1, self.size))
        return {**batch, "advantages": shaped.flatten()}


ALL_RIGHT = [1.0, 1.0, 1.0, 1.0]
"""What a trainer makes of TRL's advantages and the rewards; the rewards; and which groups are live then."""
SHAPED: dict[str, tuple[Any, list[list[float]], list[bool]]] = {
    "a bonus for groups that are all right": (
        lambda advantages, rewards: advantages + 0.5 * (rewards.amin(1, keepdim=True) > 0),
        [ALL_RIGHT, DEAD, LIVE],
        [True, False, True],
    ),
    "a malus for groups that are all wrong": (
        lambda advantages, rewards: advantages - 0.01 * (rewards.amax(1, keepdim=True) <= 0),
        [ALL_RIGHT, DEAD, LIVE],
        [False, True, True],
    ),
    "a scale, under which noise stays noise": (
        lambda advantages, rewards: advantages * 0.5,
        [[0.7] * 4, [100.1] * 4, LIVE],
        [False, False, True],
    ),
    "only the best groups are kept": (
        lambda advantages, rewards: advantages * (rewards.sum(1, keepdim=True) > 1),
        [LIVE, HALF, [1.0, 1.0, 1.0, 0.0]],
        [False, True, True],
    ),
    "no scale, with noise of its own": (
        lambda advantages, rewards: rewards - rewards.mean(1, keepdim=True) + 1e-8,
        [ALL_RIGHT, DEAD, LIVE],
        [False, False, True],
    ),
}


@pytest.mark.parametrize(("shape", "rewards", "live"), SHAPED.values(), ids=SHAPED)
def test_41_shaped_advantages_that_are_equal_and_not_0_are_live_and_those_that_are_0_are_dead(
    tmp_path: Any, shape: Any, rewards: list[list[float]], live: list[bool]
) -> None:
    trainer = make_trainer(tmp_path, Rewards(rewards), trainer_class=Shaped, max_steps=1)
    trainer.shape = shape
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.metrics["replay/dead_fraction"] == live.count(False) / 3
    assert len(session.buffer) == live.count(True)


def test_41_a_group_with_a_bonus_keeps_its_gradient(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [ALL_RIGHT, DEAD, DEAD]), trainer_class=Shaped, max_steps=2)
    trainer.shape = SHAPED["a bonus for groups that are all right"][0]
    session = trl_replay.attach(trainer)
    steps = record(session)
    trainer.train()
    ids = steps[1][1][ROWS][:, 0].view(3, 4)
    assert [bool((rows < 0).all()) for rows in ids] == [False, True, True]


REWARDS = [
    [[1, 0, None, 0.5], [0.7] * 4, [0, 0, 0, 0]],
    [[0.2, None, None, 0.1], [100.1, 100.1, 100.0, 100.1], [0, 0, 0, 0]],
]


@pytest.mark.parametrize("several", [False, True], ids=["one function", "two functions"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_41_trls_rules_for_advantages_stand_in_compat_bit_for_bit(
    tmp_path: Any, aggregation: str, scale: str, several: bool
) -> None:
    functions = [Rewards(rewards) for rewards in REWARDS[: 1 + several]]
    for number, function in enumerate(functions):
        function.__name__ = f"function{number}"
    trainer = make_trainer(
        tmp_path, functions, trainer_class=Shaped, max_steps=1, multi_objective_aggregation=aggregation,
        scale_rewards=scale, reward_weights=[1.0, 0.3][: 1 + several],
    )  # fmt: skip
    trainer.train()
    expected = compat.advantages(trainer.raw, compat.reward_setup(trainer), 4)
    assert torch.equal(trainer.scored[-1]["advantages"], expected)


def test_41_all_wrong_groups_are_dead_though_normalize_then_sum_gives_them_a_tiny_advantage(tmp_path: Any) -> None:
    """Their advantages are -6e-9 in a batch with live groups, where the batch's mean is not exactly 0."""
    generator = np.random.default_rng(0)
    script = [[LIVE, [round(r, 1) for r in generator.random(4)], DEAD] for _ in range(20)]
    trainer = make_trainer(
        tmp_path, Rewards(*script), trainer_class=Spy, max_steps=20, multi_objective_aggregation="normalize_then_sum"
    )
    session = trl_replay.attach(trainer, replay_max_fraction=0.0)
    trainer.train()
    tiny = [float(batch["advantages"][8:].abs().max()) for batch in trainer.scored]
    assert any(value > 0 for value in tiny), "the case is there"
    assert session.totals.counters["dead"] == 20


class Merging(Spy):
    """Dynamic sampling as a subclass does it: scores twice, and puts groups of the second in dead ones' places."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        kept, other = (super(Merging, self)._generate_and_score_completions(inputs) for _ in range(2))
        width = min(kept["completion_ids"].size(1), other["completion_ids"].size(1))
        merged = {}
        for key, value in kept.items():
            second = other[key]
            if value.dim() > 1 and key.startswith("completion"):
                value, second = value[:, :width], second[:, :width]
            merged[key] = torch.cat([value[:8], second[8:]]) if value.dim() else value
        return merged


class ScoringOthersToo(Spy):
    """Computes rewards of something else, after those of its batch."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        texts = ["-"] * len(inputs)
        self._calculate_rewards(inputs, texts, texts, [[1]] * len(inputs))
        return batch


class Retrying(Spy):
    """Scores until a group is live, and returns what it scored last."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        for _ in range(3):
            batch = super()._generate_and_score_completions(inputs)
            if bool(batch["advantages"].any()):
                break
        return batch


class ScoringItself(Spy):
    """Scores through its own wrapped method."""

    depth = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.depth += 1
        try:
            if self.depth == 1:
                return self._generate_and_score_completions(inputs)
            return super()._generate_and_score_completions(inputs)
        finally:
            self.depth -= 1


MANY = [3.0, 1.0, 0.0, 0.0]


def test_40_a_trainer_that_merges_what_it_scored_twice_is_refused_before_anything_is_stored(tmp_path: Any) -> None:
    script = Rewards([LIVE, HALF, DEAD], [DEAD, DEAD, MANY])
    trainer = make_trainer(tmp_path, script, trainer_class=Merging, max_steps=3)
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.SeamError, match=r"_calculate_rewards 2 times.*those of 0 of the results.*detach"):
        trainer.train()
    assert len(session.buffer) == 0
    assert session.totals.counters["stored"] == 0


@pytest.mark.parametrize("trainer_class", [ScoringOthersToo, Retrying, ScoringItself])
def test_40_of_several_rewards_those_of_the_batch_are_stored(tmp_path: Any, trainer_class: type) -> None:
    """The batch is that of the second script for the one that tries again, and of the first for the others."""
    first, second = [MANY, HALF, LIVE], [LIVE, LIVE, MANY]
    script = {
        ScoringOthersToo: Rewards(first, second),
        Retrying: Rewards([DEAD, [1.0] * 4, DEAD], first),
        ScoringItself: Rewards(first),
    }[trainer_class]
    trainer = make_trainer(tmp_path, script, trainer_class=trainer_class, max_steps=1)
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.buffer.table.reward_mean.tolist() == [1.0, 0.5, 0.25]


def test_40_rewards_that_explain_a_batch_alike_but_are_not_the_same_are_refused(tmp_path: Any) -> None:
    """Of two all-dead batches nobody can tell which one was returned, and their pass rates differ."""
    script = Rewards([DEAD, DEAD, DEAD], [[1.0] * 4, DEAD, DEAD])
    trainer = make_trainer(tmp_path, script, trainer_class=ScoringOthersToo, max_steps=1)
    session = trl_replay.attach(trainer)
    with pytest.raises(trl_replay.SeamError, match="those of 2 of the results"):
        trainer.train()
    assert len(session.buffer) == 0


class Composer:
    """Edits the list of placements, and so what the batch is checked against and which rows count as replayed."""

    @trl_replay.hookimpl
    def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
        placements.clear()
        return batch


@pytest.fixture
def _composer() -> Any:
    trl_replay.register(Composer(), "composer")
    yield
    trl_replay.unregister("composer")


@pytest.mark.usefixtures("_composer")
def test_42_a_compose_hook_cant_edit_what_was_placed(tmp_path: Any) -> None:
    """Else rows of the policy of today were flagged as replayed, with the log-probs of others."""
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), trainer_class=Spy, max_steps=2)
    trl_replay.attach(trainer, replay_plugins=["composer"])
    with pytest.raises(trl_replay.HookError, match=r"'composer'.*trl_replay_compose.*'tuple' object has no attribute"):
        trainer.train()
    assert len(trainer.losses) == 1


def spoil(table: Any) -> None:
    table.score[:] = 1.0


def spoiling_sampler(table: Any, count: int, context: Any) -> Any:
    spoil(table)
    return list(range(count))


def spoiling_evictor(table: Any, context: Any) -> Any:
    spoil(table)
    return table.serial


def spoiling_scorer(groups: Any, context: Any) -> Any:
    spoil(context.table)
    return np.ones(len(groups))


SPOILING = {"sampler": spoiling_sampler, "evictor": spoiling_evictor, "scorer": spoiling_scorer}


@pytest.mark.parametrize("kind", SPOILING)
def test_42_a_strategy_cant_write_to_a_core_column(tmp_path: Any, kind: str, monkeypatch: Any) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match="read-only"):  # as a trial before training shows
        trl_replay.attach(make_trainer(tmp_path, Rewards([LIVE] * 3)), **{f"replay_{kind}": SPOILING[kind]})
    monkeypatch.setattr("trl_replay.assembly.rehearse", lambda *given, **named: None)
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [LIVE, DEAD, DEAD]), max_steps=6)
    session = trl_replay.attach(trainer, **{f"replay_{kind}": SPOILING[kind]}, replay_buffer_size=4, replay_cooldown=2)
    with pytest.raises(trl_replay.HookError, match=f"The {kind} .*read-only"):
        trainer.train()
    assert 1.0 not in session.buffer.table.score.tolist()


def test_42_sessions_and_subsets_give_core_columns_to_read_and_plugins_columns_to_write(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), max_steps=3)
    session = trl_replay.attach(trainer)
    session.buffer.table.add_column("seen")
    trainer.train()
    for table in (session.buffer.table, session.buffer.table.take(np.array([0, 1]))):
        for name in COLUMNS:
            with pytest.raises(ValueError, match="read-only"):
                getattr(table, name)[:] = 0
    session.buffer.table.seen[:] = 5.0
    assert session.buffer.table.seen.tolist() == [5.0] * 3
    assert session.buffer.table.uses.tolist() == [2, 2, 2], "the buffer itself still writes"


class Told(Spy):
    """Keeps the entropies that the loss was given, and what the adaptive control made of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controlled: list[float] = []

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        self.losses[-1]["entropies"] = self.entropies
        self.controlled.append(getattr(self, "_last_world_entropy", 0.0))
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.entropies = result[1].detach() if result[1] is not None else None
        return result


def fresh_tokens(loss: dict[str, Any]) -> Any:
    fresh = loss["inputs"].rows[:, 0] >= 0
    return loss["inputs"]["completion_mask"].bool() & fresh.unsqueeze(1)


def logged(trainer: Any, key: str) -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "cispo", "sapo"])
def test_49_what_the_loss_computes_is_logged_of_fresh_rows_alone(tmp_path: Any, loss: str, level: str) -> None:
    """With two iterations a fresh row's ratio is not 1 in the second, so that there is something to clip."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD]), trainer_class=Told, max_steps=4, num_iterations=2,
        beta=0.1, epsilon=0.01, epsilon_high=1.02 if loss == "cispo" else 0.01, loss_type=loss,
        importance_sampling_level=level, learning_rate=2e-2,
    )  # fmt: skip
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert session.totals.counters["replaced"] == 2
    expected: dict[str, list[float]] = {"entropy": [], "kl": [], "clip_ratio": []}
    for seen in trainer.losses:
        inputs, new, mask = seen["inputs"], seen["logps"], fresh_tokens(seen)
        rows = mask.any(dim=1)
        logs = (new - inputs["old_per_token_logps"]) * mask
        logs = logs if level == "token" else logs.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        gap = inputs["ref_per_token_logps"] - new
        kl = (gap.exp() - gap - 1) * (logs.exp() if trainer.args.use_bias_correction_kl else 1.0)
        signal = inputs["advantages"].unsqueeze(1)
        low, high = (0.0, 1.02) if loss == "cispo" else (0.99, 1.01)
        clipped = ((logs.exp() > high) & (signal > 0)) | ((logs.exp() < low) & (signal < 0))
        expected["entropy"].append(float(seen["entropies"][mask].mean()))
        expected["kl"].append(float(kl.expand_as(mask)[mask].mean()))
        chosen = clipped[mask] if level == "token" else clipped[rows]
        expected["clip_ratio"].append(float(chosen.float().mean()))
    for name, values in expected.items():
        if name == "clip_ratio" and loss == "sapo":
            assert logged(trainer, "replay/fresh_clip_ratio") == []
            continue
        assert logged(trainer, f"replay/fresh_{name}") == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert max(expected["clip_ratio"]) > 0


def test_49_with_nothing_replayed_they_are_trls_own(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path,
        Rewards([LIVE, HALF, DEAD]),
        max_steps=4,
        num_iterations=2,
        beta=0.1,
        epsilon=0.01,
        learning_rate=2e-2,
    )
    trl_replay.attach(trainer, replay_dry_run=True)
    trainer.train()
    names = {"fresh_entropy": "entropy", "fresh_kl": "kl", "fresh_clip_ratio": "clip_ratio/region_mean"}
    for ours, theirs in names.items():
        assert logged(trainer, f"replay/{ours}") == pytest.approx(logged(trainer, theirs), rel=1e-4, abs=1e-6)
        assert len(logged(trainer, theirs)) == 4


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef_delta": 0.01}


@since("1.8.0", "the adaptive entropy bonus")
@pytest.mark.parametrize("quantile", [1.0, 0.5])
@pytest.mark.parametrize("layout", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}], ids=str)
def test_49_the_adaptive_entropy_bonus_goes_by_fresh_rows_alone(
    tmp_path: Any, layout: dict[str, Any], quantile: float
) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD]), trainer_class=Told, max_steps=3, learning_rate=5e-2,
        top_entropy_quantile=quantile, **ADAPTIVE, **layout,
    )  # fmt: skip
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert session.totals.counters["replaced"] == 4
    windows = len(trainer.losses) // 3
    for number in range(3):
        losses = trainer.losses[number * windows : (number + 1) * windows]
        kept = []
        for seen in losses:
            mask = fresh_tokens(seen)
            if quantile < 1.0:
                all_tokens = seen["inputs"]["completion_mask"].bool()
                mask &= seen["entropies"] >= torch.quantile(seen["entropies"][all_tokens], 1 - quantile)
            kept.append(seen["entropies"][mask])
        told = trainer.controlled[(number + 1) * windows - 1]
        # a micro-batch without fresh tokens counts as one token of the last mean
        last = trainer.controlled[number * windows - 1] if number else 0.0
        tokens = torch.cat([part if len(part) else torch.tensor([last]) for part in kept])
        assert told == pytest.approx(float(tokens.mean()), rel=1e-5)


@since("1.8.0", "the adaptive entropy bonus")
def test_49_with_replayed_rows_alone_the_adaptive_entropy_bonus_keeps_its_last_reading(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE] * 3, [DEAD] * 3), trainer_class=Told, max_steps=3, learning_rate=5e-2, **ADAPTIVE
    )
    trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert trainer.controlled[1:] == pytest.approx([trainer.controlled[0]] * 2, rel=1e-4)
    entropies = [float(seen["entropies"].mean()) for seen in trainer.losses]
    assert abs(entropies[2] - entropies[0]) > 1e-3, "the policy's entropy has changed since"


OF_THE_LOSS = {
    "loss", "grad_norm", "policy_loss", "kl", "entropy", "entropy_coef", "aux_loss", "clip_ratio/low_mean",
    "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean", "cispo_clip_ratio",
    "vespo/phi_seq_mean",
}  # fmt: skip


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo"])
def test_49_of_trls_own_keys_only_those_that_the_loss_computes_tell_of_replayed_rows(tmp_path: Any, loss: str) -> None:
    logs = []
    for dry in (True, False):
        trainer = make_trainer(
            tmp_path / str(dry), Rewards([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD]), max_steps=2, beta=0.1, epsilon=0.05,
            loss_type=loss, learning_rate=2e-2,
        )  # fmt: skip
        trl_replay.attach(trainer, replay_start=0, replay_dry_run=dry)
        trainer.train()
        logs.append(trainer.state.log_history[1])
    changed = {key for key, value in logs[0].items() if value != logs[1].get(key) and "time" not in key}
    of_trl = {key for key in changed if not key.startswith("replay/")}
    assert {"kl", "entropy"} <= of_trl <= OF_THE_LOSS
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert all(f"`{key}`" in page or f"`{key.partition('/')[0]}/*`" in page for key in OF_THE_LOSS)
