"""Loss and gradient of every training step against those written down by hand, in Unsloth's trainer."""

import pytest
import replaying
import torch
from real_unsloth import Followed, follow_scored, trainer_of
from replaying import replay
from scenarios import COMBINATIONS, SCRIPT, follow
from support import Rewards

LONGER = {"truncated completions masked, beta": {"max_completion_length": 40, "max_steps": 8}}
"""Few of Unsloth's completions end early."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_loss_and_gradient_are_those_by_hand_with(tmp_path, name):
    follow(tmp_path, name, trainer_of, **LONGER.get(name, {}))


@pytest.mark.parametrize("name", ["dapo", "excluded, grpo, accumulation", "LoRA, beta"])
def test_the_packed_forward_has_the_same_gradient_with(tmp_path, monkeypatch, name):
    """Unsloth's default, which puts all rows of a micro-batch into one."""
    monkeypatch.setenv("UNSLOTH_GRPO_SEQ_PACKING", "1")
    trainer, _ = follow(tmp_path, name, trainer_of)
    assert trainer.gradient_errors


@pytest.mark.parametrize("settings", [{}, {"per_device_train_batch_size": 6, "steps_per_generation": 2}])
def test_what_unsloth_scored_are_the_models_log_probs(tmp_path, settings):
    follow_scored(tmp_path, **settings)


class Scaled(Followed):
    """Gradients are those by hand times the scale of single-precision gradients of a loss in half precision."""

    def compare_gradients(self, loss):
        self.expected = self.expected * self.accelerator.scaler.get_scale()
        super().compare_gradients(loss)


@pytest.mark.parametrize("name", ["dapo", "excluded, grpo, accumulation"])
def test_a_scaler_of_gradients_multiplies_ours_too(tmp_path, name):
    def scaled(*args, **settings):
        trainer = trainer_of(*args, trainer_class=Scaled, **settings)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return trainer

    follow(tmp_path, name, scaled)


def without_pads(batch, row, pad, original=replaying.original):
    """A row of which Unsloth's loss drops the pad tokens, as if they had not been generated."""
    found = original(batch, row, pad)
    kept = found["ids"] != pad
    return {
        key: value[kept] if torch.is_tensor(value) and value.shape == kept.shape and key != "prompt" else value
        for key, value in found.items()
    }


@pytest.mark.parametrize("kind", ["grpo", "bnpo"])
def test_pad_tokens_in_completions_are_left_out_as_by_unsloth(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(replaying, "original", without_pads)
    monkeypatch.setattr("real_unsloth.original", without_pads)
    settings = {"generation_kwargs": {}, "max_completion_length": 12, "importance_sampling_level": "sequence"}
    trainer = trainer_of(tmp_path, Rewards(*SCRIPT), loss_type=kind, **settings)
    replay(trainer)
    ids = torch.cat([batch["completion_ids"][batch["completion_mask"].bool()] for batch in trainer.scored])
    assert bool((ids == trainer._tokenizer.pad_token_id).any()), "no pad token was generated"
