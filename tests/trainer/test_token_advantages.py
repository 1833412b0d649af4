"""A trainer that gives each token its own advantage, as for the credit of turns: stored, placed and corrected so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corrected import SHIFTED
from credit import CREDITED as SCRIPT
from credit import Credit, followed
from generating import Coins
from methods import INJECTED
from releases import since
from replaying import build, check_batches, check_losses, loadable_model, replay
from support import DEAD, HALF, LIVE, Rewards, Spy, weights_hash

import trl_replay
from trl_replay.data.fields import ADVANTAGES
from trl_replay.testing import make_trainer

SEQUENCE = {"importance_sampling_level": "sequence"}


class Rising(Credit):
    """One sign in each row."""

    shares = torch.tensor([0.25, 0.5, 1.0, 2.0] * 8)


COMBINATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {}),
    "grpo, beta": ({"loss_type": "grpo", "beta": 0.1}, {}),
    "grpo, sequence level": ({"loss_type": "grpo", **SEQUENCE}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo, two iterations": ({"loss_type": "dr_grpo", "num_iterations": 2}, {}),
    "cispo": ({"loss_type": "cispo"}, {}),
    "luspo, sequence level": ({"loss_type": "luspo", **SEQUENCE}, {}),
    "sapo": ({"loss_type": "sapo"}, {}),
    "vespo": ({"loss_type": "vespo"}, {}),
    "two-sided clipping": ({"delta": 1.5}, {}),
    "excluded, accumulation": (
        {"loss_type": "grpo", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
        {"replay_unfilled": "exclude", "replay_max_fraction": 0.4},
    ),
    "copies": ({}, {"replay_unfilled": "intra_batch", "replay_max_fraction": 0.4}),
    "generated again": ({"max_steps": 6}, {"replay_refill_rounds": 1}),
    "rows": (
        {}, {"replay_mixer": "inject", "replay_mixer_kwargs": {"rows": 3}, "replay_advantages": "stored",
             "replay_sampler": "uniform"},
    ),
    "half weight": ({}, {"replay_weight": 0.5}),
    "topr": ({"learning_rate": 5e-2}, {"replay_correction": "topr"}),
    "truncated": ({}, {"replay_correction": "truncated"}),
    "shifted": ({"learning_rate": 5e-2}, {"replay_correction": SHIFTED}),
}  # fmt: skip
NEWER = {"luspo, sequence level": since("1.10.0", "luspo without padding in its mean")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEWER.get(name, ())) for name in COMBINATIONS])
def test_loss_and_gradient_are_those_by_hand_with(tmp_path: Any, name: str) -> None:
    training, chosen = COMBINATIONS[name]
    settings = {"max_steps": 4, "learning_rate": 2e-2, "max_completion_length": 5, **training}
    if settings.get("beta"):
        settings["model"] = loadable_model(tmp_path)
    rewards = Coins(0.15) if "replay_refill_rounds" in chosen else Rewards(*SCRIPT)
    trainer = build(tmp_path, rewards, trainer_class=Credit, **settings)
    trainer.gradients = True
    trainer.correction = chosen.get("replay_correction", "ratio")
    if "replay_weight" in chosen:
        trainer.gate = lambda new, behavior, old, weights: weights * 0.5
    session, watch = followed(trainer, **chosen)
    if name != "copies":  # a copy is neither a fresh row nor an entry's
        check_batches(watch)
        check_losses(trainer)
    assert session.totals.counters["replaced"] > 0
    assert {loss["inputs"][ADVANTAGES].dim() for loss in trainer.losses} == {2}


def test_rows_of_one_sign_get_one_weight_at_sequence_level_and_rows_of_both_are_refused(tmp_path: Any) -> None:
    settings = {"loss_type": "grpo", "learning_rate": 5e-2, **SEQUENCE}
    trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=Rising, **settings)
    trainer.correction = "topr"
    replay(trainer, replay_correction="topr")
    trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=Credit, **settings)
    trl_replay.attach(trainer, replay_correction="topr")
    with pytest.raises(trl_replay.ReplayError, match="sign of an advantage gives them to rows whose tokens have both"):
        trainer.train()


def test_a_shift_makes_a_token_without_an_advantage_count_at_sequence_level(tmp_path: Any) -> None:
    class Pausing(Credit):
        shares = torch.tensor([1.0, 0.5, 0.0, 0.25] * 8)

    def halves_pauses(rows: Any, context: Any) -> Any:
        weights = 1.0 - 0.5 * rows.advantages.eq(0)
        return trl_replay.Corrected(rows.logps, weights, rows.advantages.new_ones(len(weights)))

    trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=Pausing, loss_type="grpo", **SEQUENCE)
    trl_replay.attach(trainer, replay_correction=halves_pauses, replay_start=0)
    with pytest.raises(trl_replay.ReplayError, match="token weights"):
        trainer.train()


@pytest.mark.parametrize("setting", ["joint", "split", "auto"])
def test_advantages_computed_by_trls_rule_are_refused(tmp_path: Any, setting: str) -> None:
    """Also where those of all tokens of a row happen to be TRL's own."""

    class Even(Credit):
        shares = torch.ones(32)

    trainer = build(tmp_path, Rewards([LIVE, HALF, LIVE]), trainer_class=Even)
    trl_replay.attach(trainer, **{**INJECTED, "replay_advantages": setting})
    with pytest.raises(trl_replay.SeamError, match=f"replay_advantages='{setting}'.*replay_advantages='stored'"):
        trainer.train()


def test_tokens_that_cancel_are_not_dead_and_their_group_scores_by_their_sizes(tmp_path: Any) -> None:
    class Cancelling(Credit):
        shares = torch.tensor([1.0, -1.0] * 8)

    trainer = build(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD]), trainer_class=Cancelling, max_steps=2)
    session, _ = followed(trainer)
    (found,) = session.buffer.table.row_advantage.tolist()
    assert [abs(value) for value in found] == pytest.approx([1.4998, 0.4999, 0.4999, 0.4999], abs=1e-3)
    assert session.buffer.table.score[0] > 0
    assert session.totals.counters["dead"] == 5


def test_one_a_row_in_two_dimensions_trains_as_in_one(tmp_path: Any) -> None:
    class Column(Spy):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, ADVANTAGES: batch[ADVANTAGES].unsqueeze(1)}

    def trained(trainer_class: type, **chosen: Any) -> Any:
        trainer = build(tmp_path, Rewards(*SCRIPT), trainer_class=trainer_class)
        session = trl_replay.attach(trainer, **{"replay_start": 0, **chosen})
        trainer.train()
        assert session.totals.counters["replaced"] > 0
        return weights_hash(trainer), session.buffer.table.row_advantage.tolist()

    for chosen in ({}, {**INJECTED, "replay_advantages": "joint"}):
        assert trained(Column, **chosen) == trained(Spy, **chosen)


class Unknown(Credit):
    """Some advantages are NaN: of the first row, or of one of its tokens."""

    unknown: slice

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        batch[ADVANTAGES][0, self.unknown] = torch.nan
        return batch


def test_nan_for_all_tokens_masks_a_row_and_for_some_is_refused(tmp_path: Any) -> None:
    trainer = build(tmp_path, Rewards([[1.0, 0.0, 1.0, 0.0], DEAD, HALF]), trainer_class=Unknown, max_steps=3)
    trainer.unknown = slice(None)
    session, _ = followed(trainer)
    assert session.metrics["replay/masked_rows_fraction"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert bool(session.buffer.table.row_masked.any())
    trainer.unknown = slice(0, 1)
    with pytest.raises(trl_replay.BatchError, match="some trained tokens have finite advantages"):
        trainer.train()


def test_a_plugin_may_mask_rows_and_not_change_them(tmp_path: Any, request: Any) -> None:
    class Shaping:
        factor = float("nan")

        @trl_replay.hookimpl
        def trl_replay_advantages(self, groups: Any, context: Any) -> Any:
            shaped = groups.advantages.copy()
            shaped[:, 1] *= self.factor
            return shaped

    plugin = Shaping()
    trl_replay.register(plugin, name="shaping")
    request.addfinalizer(lambda: trl_replay.unregister("shaping"))
    trainer = build(tmp_path, Rewards([HALF, DEAD, LIVE]), trainer_class=Credit, max_steps=3)
    session = trl_replay.attach(trainer, replay_plugins="shaping")
    trainer.train()
    assert session.metrics["replay/masked_rows_fraction"] > 0
    plugin.factor = 2.0
    with pytest.raises(trl_replay.ConfigurationError, match=r"gives one to each of its tokens.*mask rows"):
        trainer.train()


def test_they_take_four_bytes_a_token_and_travel_through_files(tmp_path: Any) -> None:
    def stored(rewards: Any, source: Any = None) -> Any:
        trainer = build(tmp_path, rewards, trainer_class=Credit, max_steps=3)
        session = trl_replay.attach(trainer, replay_start=0, replay_warm_start=source)
        trainer.watch = None
        trainer.train()
        kept.append(trainer)
        return session

    kept: list[Any] = []
    session = stored(Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD]))
    (serial,) = session.buffer
    group = session.buffer.load(serial)
    tokens = int(group.completion_lengths.sum())
    assert group.tensors[ADVANTAGES].nbytes == 4 * tokens
    path = session.export(tmp_path / "groups.parquet")
    again = stored(Rewards([DEAD, DEAD, DEAD]), path)
    (serial,) = again.buffer
    read = again.buffer.load(serial)
    assert again.totals.counters["replaced"] > 0
    for mine, theirs in zip(read.advantages, group.advantages, strict=True):
        assert torch.equal(mine, theirs)


def test_a_files_one_advantage_a_row_is_that_of_each_token(tmp_path: Any) -> None:
    trainer = build(tmp_path, Rewards([DEAD, DEAD, DEAD]), trainer_class=Credit, max_steps=3)
    rows = [{"prompt": "1=", "completion": f"{n}2", "reward": float(n < 1)} for n in range(4)]
    session = trl_replay.attach(trainer, replay_start=0)
    session.add(rows)
    trainer.watch = None
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    given = trainer.losses[-1]["inputs"]
    shown = given[ADVANTAGES].masked_fill(given["completion_mask"].eq(0), torch.nan)
    assert any(row[~row.isnan()].unique().numel() == 1 and float(row[0]) > 1 for row in shown)


def test_a_resumed_run_ends_as_the_one_that_went_on(tmp_path: Any) -> None:
    def trained(checkpoint: str | None = None) -> tuple[str, Any]:
        rewards = Rewards(*SCRIPT)
        rewards.calls = 3 if checkpoint else 0
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        trainer = build(tmp_path / "run", rewards, trainer_class=Credit, **settings)
        session = trl_replay.attach(trainer, replay_start=0)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert session.totals.counters["replaced"] > 3
        return weights_hash(trainer), session.buffer.table.row_advantage.tolist()

    assert trained() == trained(str(tmp_path / "run" / "checkpoint-3"))


def test_entries_with_token_advantages_are_refused_by_a_trainer_with_one_a_row(tmp_path: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}

    def attached(trainer_class: type) -> Any:
        trainer = build(tmp_path, Rewards([LIVE, DEAD, HALF]), trainer_class=trainer_class, **settings)
        trl_replay.attach(trainer, replay_start=0)
        return trainer

    attached(Credit).train()
    trainer = attached(Spy)
    with pytest.raises(trl_replay.BatchError, match="per-token advantages, but the batch has one per row"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_84_a_batch_of_one_token_does_not_decide_how_advantages_are_laid_out(tmp_path: Any, first: int) -> None:
    """Advantages `(B, 1)`, and one batch in which every completion has one token."""
    batches = 0

    from trl import GRPOTrainer

    class Column(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **named: Any) -> Any:
            nonlocal batches
            batches += 1
            length = 1 if batches == first else 5
            return [[20 + (batches + row) % 9] * length for row in range(len(prompt_ids))], None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "advantages": batch["advantages"].unsqueeze(1)}

    script = Rewards([LIVE, DEAD, HALF], [LIVE, HALF, DEAD], [DEAD] * 3)
    trainer = make_trainer(tmp_path, script, trainer_class=Column, max_steps=6)
    session = trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    assert session.totals.counters["replaced"] > 6
