"""Failures that a hostile review found: each trained on wrong values, or failed where words belong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import DEAD, HALF, LIVE, Rewards, Spy
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.strategies.storages import CpuStorage
from trl_replay.testing import make_model, make_tokenizer, make_trainer

WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 6}
SCRIPT = ([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD])


class Interrupt(TrainerCallback):
    """Stops training inside a window, after a number of substeps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupted(tmp_path: Any, after: int = 3, **settings: Any) -> Any:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, **WINDOW, **settings)
    trainer.add_callback(Interrupt(after))
    return trainer


def test_replayed_rows_left_in_the_trainers_buffer_are_not_trained_on_after_detach(tmp_path: Any) -> None:
    trainer = interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), trl_replay.attached(trainer) as session:
        trainer.train()
    assert session.totals.counters["replaced"] > 0
    trainer.losses.clear()
    trainer.train()
    assert trainer.losses
    for loss in trainer.losses:
        assert ROWS not in loss["inputs"]
        assert bool((loss["inputs"]["advantages"] == 0).all()), "stock generated anew: its own dead groups"


def test_attaching_again_after_an_interrupted_window_trains(tmp_path: Any) -> None:
    trainer = interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), trl_replay.attached(trainer):
        trainer.train()
    with trl_replay.attached(trainer):
        trainer.train()
        trainer.train()


def test_rows_noted_before_weights_were_loaded_are_not_recorded(tmp_path: Any) -> None:
    """Interrupted in a window, then resumed from an older checkpoint in the same process."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, LIVE]), trainer_class=Spy, max_steps=6, save_strategy="steps", save_steps=1,
        learning_rate=5e-2, **WINDOW,
    )  # fmt: skip
    trainer.add_callback(Interrupt(4))
    session = trl_replay.attach(trainer, replay_max_fraction=0.0)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    before, noted = len(trainer.losses), session.carry.serial
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert session.totals.counters["refused"] > 0
    sums: dict[str, list[float]] = {}
    for loss in trainer.losses[:before]:
        inputs, mask = loss["inputs"], loss["inputs"]["completion_mask"].bool()
        for row in range(len(mask)):
            tokens = str(inputs["completion_ids"][row][mask[row]].tolist())
            sums.setdefault(tokens, []).append(float(loss["logps"][row][mask[row]].sum()))
    old = [serial for serial in session.buffer.table.serial.tolist() if serial < noted]
    assert old, "groups from before the interruption are kept"
    for serial in old:
        group = session.buffer.storage.get(serial)
        lengths = group.completion_lengths.tolist()
        ids, logps = (group.tensors[key].split(lengths) for key in ("completion_ids", "old_per_token_logps"))
        for tokens, values in zip(ids, logps, strict=True):
            known = sums.get(str(tokens.tolist()), [])
            assert any(abs(float(values.sum()) - value) < 1e-4 for value in known), "recorded under the loaded weights"


@pytest.mark.parametrize("correction", ["ratio", "none", "truncated", "topr", "shaped", "decoupled"])
def test_the_off_policy_mask_sees_the_behaviour_log_probs_whatever_the_correction(
    tmp_path: Any, correction: str
) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD]), trainer_class=Spy, max_steps=4, learning_rate=5e-2,
        off_policy_mask_threshold=0.05,
    )  # fmt: skip
    trl_replay.attach(trainer, replay_correction=correction)
    trainer.train()
    stored: dict[str, torch.Tensor] = {}
    checked = 0
    for loss in trainer.losses:
        inputs, mask = loss["inputs"], loss["inputs"]["completion_mask"].bool()
        for row, number in enumerate(inputs.rows[:, 0].tolist()):
            tokens = str(inputs["completion_ids"][row][mask[row]].tolist())
            if number >= 0:
                stored.setdefault(tokens, loss["logps"][row][mask[row]])
            else:
                torch.testing.assert_close(inputs["sampling_per_token_logps"][row][mask[row]], stored[tokens])
                checked += 1
    assert checked >= 16


class FullOnce(CpuStorage):
    """A storage whose second put fails, once."""

    puts = 0

    def put(self, serial: int, group: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            raise OSError("disk full")
        super().put(serial, group)


def test_a_storage_that_fails_once_leaves_no_entry_without_payload(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD, DEAD, DEAD]), max_steps=3)
    session = trl_replay.attach(trainer, replay_storage=FullOnce())
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    trainer.train()
    assert all(session.buffer.storage.get(serial) for serial in session.buffer.table.serial.tolist())


def test_a_half_life_lowers_negative_scores_too(tmp_path: Any) -> None:
    rewards = [[-9.0, -10, -10, -10], [-9.0, -9, -10, -10], DEAD]
    trainer = make_trainer(tmp_path, Rewards(rewards), max_steps=6)
    session = trl_replay.attach(trainer, replay_half_life=2.0, replay_scorer="mean_reward", replay_buffer_size=4)
    trainer.train()
    assert int((session.update - session.buffer.table.step).max()) <= 3, "the oldest do not stay for ever"


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-2, 1.0, 1e4])
def test_small_rewards_are_live_under_normalize_then_sum(tmp_path: Any, scale: float) -> None:
    rewards = [[scale * reward for reward in group] for group in (LIVE, HALF, DEAD)]
    trainer = make_trainer(tmp_path, Rewards(rewards), max_steps=1, multi_objective_aggregation="normalize_then_sum")
    session = trl_replay.attach(trainer)
    trainer.train()
    assert session.metrics["replay/dead_fraction"] == pytest.approx(1 / 3)


def test_a_compose_hook_that_drops_a_placement_is_an_error(tmp_path: Any) -> None:
    class Dropping:
        @trl_replay.hookimpl
        def trl_replay_compose(self, batch: Any, placements: Any, context: Any) -> Any:
            return batch

    trl_replay.register(Dropping(), "dropping")
    try:
        trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE]), max_steps=3)
        trl_replay.attach(trainer, replay_plugins="dropping", replay_selector="always")
        trl_replay.detach(trainer)
        trl_replay.attach(
            trainer, replay_plugins="dropping", replay_selector="always", replay_selector_kwargs={"share": 1.0}
        )
        with pytest.raises(trl_replay.ResultError, match="without the group placed there"):
            trainer.train()
    finally:
        trl_replay.unregister("dropping")


def test_a_correction_that_is_not_finite_is_an_error(tmp_path: Any) -> None:
    def broken(rows: Any, context: Any) -> Any:
        return trl_replay.Corrected(torch.full_like(rows.logps, float("nan")))

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    trl_replay.attach(trainer, replay_correction=broken)
    with pytest.raises(trl_replay.ResultError, match="old_logps that are not finite"):
        trainer.train()
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_an_error_before_the_first_loss_and_a_pause_leave_no_false_alarm(tmp_path: Any) -> None:
    class Once(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_step_begin = lambda *args, **kwargs: None

    script = Rewards(*SCRIPT, [DEAD, DEAD, LIVE])
    trainer = make_trainer(tmp_path, script, max_steps=2)
    session = trl_replay.attach(trainer)
    stock_loss = Spy.__mro__[1]._compute_loss

    def failing(self: Any, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    type(trainer)._compute_loss = failing
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
    finally:
        type(trainer)._compute_loss = stock_loss
    session.pause()
    trainer.train()
    session.resume()
    trainer.train()


def test_detaching_in_a_callback_skips_no_other_callback(tmp_path: Any) -> None:
    class Detach(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trl_replay.detach(trainer)

    class Count(TrainerCallback):
        steps: list[int] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(state.global_step)

    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3)
    trl_replay.attach(trainer)
    trainer.add_callback(Detach())
    trainer.add_callback(Count())
    trainer.train()
    assert Count.steps == [1, 2, 3]


def test_an_age_limit_below_the_generation_interval_is_refused(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), num_iterations=2)
    with pytest.raises(trl_replay.RefusedError, match="replay_max_age=1 is less than the 2 updates"):
        trl_replay.attach(trainer, replay_max_age=1)


def test_attention_dropout_and_absolute_positions_are_warned_of(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), model=make_model(tokenizer, attention_dropout=0.3))
    with pytest.warns(UserWarning, match="model has dropout"):
        trl_replay.attach(trainer)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), model=GPT2LMHeadModel(config))
    with pytest.warns(UserWarning, match="learned absolute positions"):
        trl_replay.attach(trainer)


@pytest.mark.parametrize("given", [{"replay_buffer_size": 8}, 64, {}])
def test_something_else_than_a_config_is_refused_in_words(tmp_path: Any, given: Any) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match="takes a ReplayConfig"):
        trl_replay.attach(make_trainer(tmp_path, Rewards(*SCRIPT)), given)


def test_none_is_no_trainer() -> None:
    with pytest.raises(trl_replay.ContractError, match="NoneType"):
        trl_replay.attach(None)


BAD: list[dict[str, Any]] = [{"replay_plugins": [1]}, {"replay_plugins": 3}, {"replay_preset": 3}]


@pytest.mark.parametrize("settings", BAD)
def test_a_setting_of_the_wrong_type_names_itself(settings: dict[str, Any]) -> None:
    ((name, _),) = settings.items()
    with pytest.raises(trl_replay.ConfigurationError, match=f"{name}=.* can't be used"):
        trl_replay.ReplayConfig(**settings)


def test_numpy_numbers_and_a_huge_capacity_are_fine(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    session = trl_replay.attach(
        trainer, replay_buffer_size=10**14, replay_max_age=np.int64(3), replay_max_fraction=np.float32(0.5)
    )
    trainer.train()
    assert session.buffer.capacity == 10**14
    assert len(session.buffer) == 2
