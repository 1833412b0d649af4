"""Corrections by hand, and the combinations in which they are exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import LOSSES

MASKS: dict[str, dict[str, float]] = {
    "sequence_mask": {"low": 0.8, "high": 1.25},
    "icepop": {"low": 0.8, "high": 1.25},
}
"""Masks, with limits that some replayed rows or tokens of `train` pass and others don't."""


def weights_by_hand(name: str, new: torch.Tensor, behavior: torch.Tensor, advantage: Any) -> tuple[Any, Any]:
    """`(old, weights)` of one replayed row's tokens; m2po is over all rows and done in its own test.

    Where each token has its own advantage, it goes by that one's sign.
    """
    if torch.is_tensor(advantage):
        positive, negative = (weights_by_hand(name, new, behavior, sign) for sign in (1.0, -1.0))
        return positive[0], torch.where(advantage >= 0, positive[1], negative[1])
    r = (new - behavior).double().exp()
    one = torch.ones_like(r)
    if name in MASKS:
        return behavior, torch.tensor(mask_by_hand(name, r.tolist()), dtype=one.dtype)
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
    if name == "topr":
        return new, one if advantage >= 0 else one * min(float(r.prod()), 1.0)
    if name == "decoupled":
        return new, torch.minimum(r, one * 2.0)
    assert name == "shaped"
    return new, 0.1 * r / (r + 0.1) ** 2


def mask_by_hand(name: str, ratios: list[float], **limits: float) -> list[float]:
    """The weight of each token of a row, from the masks' definitions; limits as in `MASKS` where none are given."""
    chosen = limits or MASKS[name]
    low, high = chosen["low"], chosen["high"]
    if name == "icepop":
        return [float(low <= ratio <= high) for ratio in ratios]
    geometric_mean = math.prod(ratios) ** (1 / len(ratios))
    return [float(low <= geometric_mean <= high)] * len(ratios)


CORRECTIONS = ["ratio", "none", "truncated", "topr", "decoupled", "shaped"]
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
