"""Runs with corrections and gates, and the check of each of their losses against the one computed by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_by_hand import Row, reference_loss
from support import DEAD, HALF, LIVE, LOSSES, Rewards, Spy

import trl_replay
from trl_replay.testing import make_model, make_tokenizer, make_trainer

SCRIPT = ([LIVE, HALF, [1, 1, 1, 0.0]], [DEAD, LIVE, DEAD])


MASKS: dict[str, dict[str, float]] = {
    "geo_mask": {"low": 0.8, "high": 1.25},
    "k3_mask": {"threshold": 0.05},
    "icepop": {"low": 0.8, "high": 1.25},
    "outlier_mask": {"low": 0.6, "high": 1.6},
    "veto_negative": {"low": 0.8, "high": 1.25},
}
"""Masks, with limits that some replayed rows or tokens of `train` pass and others don't."""


def weights_by_hand(name: str, new: torch.Tensor, behavior: torch.Tensor, advantage: float) -> tuple[Any, Any]:
    """`(old, weights)` of one replayed row's tokens; m2po is over all rows and done in its own test."""
    r = (new - behavior).double().exp()
    one = torch.ones_like(r)
    if name in MASKS:
        return behavior, torch.tensor(mask_by_hand(name, r.tolist(), advantage), dtype=one.dtype)
    if name == "ratio":
        return behavior, one
    if name == "none":
        return new, one
    if name == "per":
        std = 3**-0.5  # of two right among four; TRL divides by 1e-4 more than it, and than the others' 0.5
        chance = (2 * std / (std + 1e-4)) / (1.5 * 0.5 / (0.5 + 1e-4))
        return behavior, one * (chance**-0.5 if 0.8 < abs(advantage) < 0.9 else 1.0)
    if name == "truncated":
        return new, torch.minimum(r, one * 2.0)
    if name == "sequence_mask":
        mean = math.exp(float((new - behavior).double().mean()))
        return behavior, one * (0.5 <= mean <= 2.0)
    if name == "topr":
        return new, one if advantage >= 0 else one * min(float(r.prod()), 1.0)
    if name == "decoupled":
        return new, torch.minimum(r, one * 2.0)
    assert name == "shaped"
    return new, 0.1 * r / (r + 0.1) ** 2


def mask_by_hand(name: str, ratios: list[float], advantage: float, **limits: float) -> list[float]:
    """The weight of each token of a row, from the masks' definitions; limits as in `MASKS` where none are given."""
    chosen = limits or MASKS[name]
    low, high, threshold = (chosen.get(limit, math.nan) for limit in ("low", "high", "threshold"))
    inside = [low <= ratio <= high for ratio in ratios]
    geometric_mean = math.prod(ratios) ** (1 / len(ratios))
    if name == "icepop":
        return [float(near) for near in inside]
    if name == "outlier_mask":
        kept = all(inside)
    elif name == "k3_mask":
        kept = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios) <= threshold
    else:
        kept = low <= geometric_mean <= high
    if name == "veto_negative" and advantage >= 0:
        kept = True
    return [float(kept)] * len(ratios)


CORRECTIONS = ["ratio", "none", "truncated", "sequence_mask", "topr", "decoupled", "shaped"]
TOKEN_WEIGHTS = {"truncated", "m2po", "icepop", "decoupled", "shaped"}


TWO_LOSSES = ("grpo", "cispo")
"""The one has the gradient of ratio × weight, the other of the log-prob with both as constants."""


def allowed(
    corrections: Sequence[str], betas: Sequence[float], losses: Sequence[str] = LOSSES
) -> list[tuple[str, str, str, float]]:
    """Every `(correction, loss type, importance level, beta)` in which the correction's weights are exact."""
    return [
        (correction, loss, level, beta)
        for correction, loss, level, beta in itertools.product(corrections, losses, ("token", "sequence"), betas)
        if level == "token" or correction not in TOKEN_WEIGHTS or loss == "cispo"
    ]


Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the new, behavior and old log-probs of a row's tokens and their weights to other weights."""


kept: list[Path] = []


def with_reference(folder: Path) -> Any:
    """The tiny model, whose first weights TRL can load for the reference model: they are written only once."""
    model = make_model(make_tokenizer())
    if not kept:
        model.save_pretrained(folder / "initial_model")
        kept.append(folder / "initial_model")
    model.config._name_or_path = str(kept[0])
    return model


def train(
    tmp_path: Any, correction: str, replay: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, trl_replay.Session]:
    settings = {"max_steps": 3, "learning_rate": 2e-2, "max_completion_length": 5, **settings}
    settings = {"gradient_checkpointing": False, **settings}  # which computes the same twice, within the layers
    if settings.get("beta"):
        settings["model"] = with_reference(tmp_path)
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), trainer_class=Spy, **settings)
    trainer.signals = {}
    chosen: dict[str, Any] = {"replay_correction": correction, "replay_sampler": "newest"}
    if correction in MASKS:
        chosen["replay_correction_kwargs"] = MASKS[correction]
    session = trl_replay.attach(trainer, **chosen | (replay or {}))
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
        expected = reference_loss(trainer, rows)
        assert float(loss["loss"]) == pytest.approx(expected, rel=2e-4, abs=2e-6)
    return replayed
