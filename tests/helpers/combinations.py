"""Combinations of settings in which every loss and gradient is compared with those written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from advantages_by_hand import mixed_advantages
from corrected import MASKED, PROXIMAL, SHIFTED
from generating import Coins
from methods import EVERY_GROUP, INJECTED, SAME_PROMPT
from replaying import Watch, build, check_batches, check_losses, loadable_model
from support import DEAD, HALF, LIVE, Rewards, truncating

import trl_replay

MOST = [1.0, 1.0, 1.0, 0.0]
SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [MOST, DEAD, DEAD])
LIVELY = ([LIVE, HALF, MOST], [DEAD, LIVE, HALF], [HALF, DEAD, LIVE])
ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
SEQUENCE = {"importance_sampling_level": "sequence"}
ONE_ROW = {**INJECTED, "replay_mixer_kwargs": {"rows": 1}}
REFILLED = {"replay_refill_rounds": 2}
EXCLUDED = {"replay_unfilled": "exclude", "replay_max_fraction": 0.4}


def heavy(new: torch.Tensor, behavior: torch.Tensor, old: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`replay_weight=0.5` and `replay_max_weight=0.45`."""
    total = (new - old).double().exp() * weights * 0.5
    return weights * 0.5 * torch.where(total > 0.45, 0.45 / total, 1.0)


def halved(new: torch.Tensor, behavior: torch.Tensor, old: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`replay_weight=0.5`."""
    return weights * 0.5


def correction(name: str, **settings: Any) -> dict[str, Any]:
    return {"replay_correction": name, **settings}


COMBINATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # whole groups
    "dapo": ({}, {}),
    "grpo, beta": ({"loss_type": "grpo", "beta": 0.1}, {}),
    "bnpo, accumulation": ({"loss_type": "bnpo", **ACCUMULATED}, {}),
    "dr_grpo, two iterations": ({"loss_type": "dr_grpo", "num_iterations": 2}, {}),
    "cispo, sequence level": ({"loss_type": "cispo", "epsilon_high": 5.0, **SEQUENCE}, {}),
    "luspo, sequence level, beta": ({"loss_type": "luspo", "beta": 0.1, **SEQUENCE}, {}),
    "vespo": ({"loss_type": "vespo"}, {}),
    "sapo, high-entropy tokens": ({"loss_type": "sapo", "top_entropy_quantile": 0.5}, {}),
    "two-sided clipping, two updates a batch": (
        {"delta": 1.5, "epsilon_high": 0.4, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
         "per_device_train_batch_size": 6}, {},
    ),
    "three iterations over an accumulated window": ({"num_iterations": 3, "max_steps": 9, **ACCUMULATED}, {}),
    "more accumulation than generations": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, {}),
    "generation not in step with accumulation": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3,
         "max_steps": 8}, {},
    ),
    "padding to a multiple": ({"pad_to_multiple_of": 8}, {}),
    "KL not multiplied by the ratio": ({"beta": 0.1, "use_bias_correction_kl": False}, {}),
    "rewards not scaled": ({"scale_rewards": "none"}, {}),
    "the off-policy mask": ({"off_policy_mask_threshold": 1e-3, "loss_type": "grpo"}, {}),
    "truncated completions masked, beta": ({"mask_truncated_completions": True, "beta": 0.1}, {}),
    "LoRA, beta": ({"lora": True, "beta": 0.1}, {}),
    "LoRA, sequence level, accumulation": ({"lora": True, **SEQUENCE, **ACCUMULATED}, {}),
    "a learning rate that drives ratios to their bounds, beta": ({"learning_rate": 0.3, "beta": 0.1}, {}),
    "the same at sequence level": ({"learning_rate": 0.3, "beta": 0.1, "loss_type": "grpo", **SEQUENCE}, {}),
    # what else becomes of dead groups
    "excluded, grpo, accumulation": ({"loss_type": "grpo", **ACCUMULATED}, EXCLUDED),
    "excluded, bnpo": ({"loss_type": "bnpo"}, EXCLUDED),
    "excluded, dapo, beta": ({"beta": 0.1}, EXCLUDED),
    "masked, luspo": ({"loss_type": "luspo", **SEQUENCE}, {**EXCLUDED, "replay_unfilled": "mask"}),
    "generated again": ({"loss_type": "grpo", "beta": 0.1}, REFILLED),
    "generated again, rewards scaled by batch": ({"scale_rewards": "batch"}, REFILLED),
    "generated again and mixed": ({"loss_type": "dr_grpo"}, {**REFILLED, **ONE_ROW, "replay_advantages": "joint"}),
    # corrections and gates
    "half of token weights: truncated, beta": ({"beta": 0.1}, correction("truncated", replay_weight=0.5)),
    "token weights: a mask, grpo, high-entropy tokens": (
        {"loss_type": "grpo", "top_entropy_quantile": 0.6}, correction(MASKED),
    ),
    "token weights: truncated, LoRA": ({"lora": True, "loss_type": "dr_grpo"}, correction("truncated")),
    "token weights: of the proximal policy, cispo, sequence level": (
        {"loss_type": "cispo", **SEQUENCE}, correction(PROXIMAL),
    ),
    "row weights: topr, the off-policy mask": (
        {"off_policy_mask_threshold": 0.02, "loss_type": "grpo", "learning_rate": 5e-2}, correction("topr"),
    ),
    "row weights: topr, sequence level": ({"loss_type": "grpo", **SEQUENCE}, correction("topr")),
    "row weights: sequence_mask, vespo": ({"loss_type": "vespo"}, correction("sequence_mask")),
    "shifted advantages, two iterations, beta": (
        {"num_iterations": 2, "max_steps": 6, "beta": 0.1}, correction(SHIFTED),
    ),
    "shifted advantages, the off-policy mask, half weight": (
        {"off_policy_mask_threshold": 0.02, "loss_type": "grpo", "learning_rate": 5e-2},
        correction(SHIFTED, replay_weight=0.5),
    ),
    "shifted advantages, sequence level, accumulation": (
        {"loss_type": "grpo", **SEQUENCE, **ACCUMULATED}, correction(SHIFTED),
    ),
    "half weight, sapo, beta": ({"loss_type": "sapo", "beta": 0.1}, {"replay_weight": 0.5}),
    "half weight, the same micro-batch twice": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, {"replay_weight": 0.5},
    ),
    "capped weights, accumulation": ({**ACCUMULATED}, {"replay_weight": 0.5, "replay_max_weight": 0.45}),
    "entropy bonus": ({"entropy_coef": 0.05}, {}),
    # rows
    "rows: joint, grpo, beta": ({"loss_type": "grpo", "beta": 0.1}, {**INJECTED, "replay_advantages": "joint"}),
    "rows: split, bnpo, accumulation": (
        {"loss_type": "bnpo", **ACCUMULATED}, {**INJECTED, "replay_advantages": "split"},
    ),
    "rows: stored, any prompt, vespo": (
        {"loss_type": "vespo"},
        {"replay_mixer": "inject", "replay_mixer_kwargs": {"rows": 3}, "replay_advantages": "stored", **EVERY_GROUP},
    ),
    "rows: joint, excluded, rewards scaled by batch": (
        {"scale_rewards": "batch"}, {**ONE_ROW, "replay_unfilled": "exclude", "replay_advantages": "joint"},
    ),
    "rows: joint, LoRA, token weights": (
        {"lora": True, "scale_rewards": "none"}, {**INJECTED, **correction("truncated"), "replay_advantages": "joint"},
    ),
    "rows: joint, shifted advantages": (
        {"loss_type": "dr_grpo"}, {**INJECTED, **correction(SHIFTED), "replay_advantages": "joint"},
    ),
    "rows: joint, two iterations, half weight": (
        {"num_iterations": 2, "max_steps": 6}, {**ONE_ROW, "replay_weight": 0.5, "replay_advantages": "joint"},
    ),
    "rows: joint, cispo, sequence level": (
        {"loss_type": "cispo", **SEQUENCE}, {**INJECTED, "replay_advantages": "joint"},
    ),
    "rows: split, sapo, two updates a batch": (
        {"loss_type": "sapo", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1,
         "steps_per_generation": 2, "max_steps": 8}, {**INJECTED, "replay_advantages": "split"},
    ),
    "rows: joint, truncated completions masked": (
        {"truncating": True, "loss_type": "grpo"}, {**INJECTED, "replay_advantages": "joint"},
    ),
    "rows into dead groups alone, recorded by the loss": (
        {}, {**SAME_PROMPT, "replay_mixer": "inject", "replay_record": "loss", "replay_advantages": "joint"},
    ),
}  # fmt: skip
GATES: dict[str, Callable[..., torch.Tensor]] = {"replay_max_weight": heavy, "replay_weight": halved}


def made(folder: Any, settings: dict[str, Any], rewards: Any, make: Callable[..., Any] = build) -> Any:
    """The trainer of a combination."""
    settings = {"max_steps": 4, "learning_rate": 2e-2, "max_completion_length": 5, **settings}
    arguments: dict[str, Any] = {}
    if settings.pop("lora", False):
        from peft import LoraConfig

        targets = ["q_proj", "v_proj", "down_proj"]
        arguments["peft_config"] = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    elif settings.get("beta"):
        settings["model"] = loadable_model(folder)
    if settings.pop("truncating", False):
        settings |= {"mask_truncated_completions": True, "max_completion_length": 12}
        arguments["rollout_func"] = truncating()
    return make(folder, rewards, arguments=arguments, **settings)


def follow(folder: Any, name: str, make: Callable[..., Any] = build, **settings: Any) -> tuple[Any, Any]:
    """Trains a combination, and compares every batch, loss and gradient; returns the trainer and the session.

    Args:
        folder: For the trainer's files.
        name: Of the combination.
        make: Makes the trainer: `build`, or as it.
        settings: Of the trainer, on top of the combination's.
    """
    training, replay = COMBINATIONS[name]
    training = {**training, **settings}
    mixes = replay.get("replay_mixer") == "inject"
    rewards: Any = Rewards(*(LIVELY if mixes else SCRIPT))
    if "replay_refill_rounds" in replay:
        rewards = Coins(0.4)
    trainer = made(folder, training, rewards, make)
    trainer.gradients = True
    trainer.correction = replay.get("replay_correction", "ratio")
    trainer.gate = next((gate for setting, gate in GATES.items() if setting in replay), None)
    session = trl_replay.attach(trainer, **{"replay_start": 0, **replay})
    watch = Watch(session, trainer.num_generations, trainer._tokenizer.pad_token_id)
    if mixes:
        mode, scale = replay["replay_advantages"], trainer.scale_rewards
        watch.advantages = lambda step: mixed_advantages(watch, step, mode, (1.0,), scale, "sum_then_normalize")
    trainer.watch, trainer.compared = watch, []
    trainer.train()
    check_batches(watch)
    check_losses(trainer, replays=rewards.__name__ == "scripted")
    assert len(trainer.gradient_errors) == len(trainer.compared) > 3
    return trainer, session
