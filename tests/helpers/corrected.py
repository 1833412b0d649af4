"""Corrections by hand, and the combinations in which they are exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import LOSSES

from trl_replay import Corrected

MASKS: dict[str, dict[str, float]] = {
    "geo_mask": {"low": 0.8, "high": 1.25},
    "k3_mask": {"threshold": 0.05},
    "icepop": {"low": 0.8, "high": 1.25},
    "outlier_mask": {"low": 0.6, "high": 1.6},
    "veto_negative": {"low": 0.8, "high": 1.25},
    "suffix_veto": {"low": 0.8, "high": 1.25},
}
"""Masks of trl-replay-papers, with limits that some replayed rows or tokens of `train` pass and others don't."""


def weights_by_hand(
    name: str, new: torch.Tensor, behavior: torch.Tensor, advantage: Any, proximal: torch.Tensor, drawn: float = 1.0
) -> tuple[Any, Any]:
    """`(old, weights)` of one replayed row's tokens; m2po is over all rows and done in its own test. `drawn` is what
    undoes uneven drawing.

    Where each token has its own advantage, it goes by that one's sign.
    """
    name = {MASKED: "icepop", PROXIMAL: "decoupled", PER: "per"}.get(name, name)
    if torch.is_tensor(advantage):
        positive, negative = (weights_by_hand(name, new, behavior, sign, proximal, drawn) for sign in (1.0, -1.0))
        return positive[0], torch.where(advantage >= 0, positive[1], negative[1])
    r = (new - behavior).double().exp()
    one = torch.ones_like(r)
    if name in MASKS:
        return behavior, torch.tensor(mask_by_hand(name, r.tolist(), advantage), dtype=one.dtype)
    if name == "ratio":
        return behavior, one
    if name in ("none", *SHIFTS):
        return new, one
    if name == "per":
        return behavior, drawn * one
    if name == FAR:
        return behavior + distances(torch.arange(len(new))), 0.7 * one
    if name == "truncated":
        return new, torch.minimum(r, one * 2.0)
    if name in ("sequence_mask", NARROW):
        mean = math.exp(float((new - behavior).double().mean()))
        low, high = (0.5, 2.0) if name != NARROW else (0.999, 1.001)
        return behavior, one * (low <= mean <= high)
    if name == "topr":
        return new, one if advantage >= 0 else one * min(float(r.prod()), 1.0)
    if name == TOPR_BY_TOKEN:
        return new, one if advantage >= 0 else torch.minimum(r, one)
    if name == "imitation":
        return new, one * (0.3 / advantage if advantage > 0 else 0.0)
    if name == "decoupled":
        return proximal, (proximal - behavior).double().exp().clamp(max=2.0)
    if name == "gipo":
        return new, r * (-(r.log() ** 2) / 2).exp()
    if name == "pnpo":
        return new - r.log().cumsum(0) / torch.arange(1, 1 + len(r)), one
    if name == "minpro":
        return behavior - torch.tensor([min(r.log().tolist()[:at], default=0.0) for at in range(len(r))]), one
    assert name == "shaped"
    return new, 0.1 * r / (r + 0.1) ** 2


NARROW = "sequence_mask(low=0.999, high=1.001)"
PER = "per(beta=0.5, final_beta=0.9, updates=8)"


def sampling_weight(chance: float, update: int) -> float:
    """By `PER`, of an entry whose chance to be drawn is so many times that of the least likely one."""
    way = min(update / 8, 1.0)
    return chance ** -(0.5 + 0.4 * way)


class OfTokens:
    """A correction with a weight for each token."""

    token_weights = True

    def __init__(self, correct: Callable[[Any], Corrected]) -> None:
        self.correct = correct

    def __call__(self, rows: Any, context: Any) -> Corrected:
        return self.correct(rows)


def near(rows: Any) -> torch.Tensor:
    log_ratios = rows.logps - rows.behavior_logps
    return (log_ratios >= math.log(0.8)) & (log_ratios <= math.log(1.25))


mask_tokens = OfTokens(lambda rows: Corrected(rows.behavior_logps, near(rows).to(rows.logps.dtype)))
from_proximal = OfTokens(
    lambda rows: Corrected(rows.proximal_logps, (rows.proximal_logps - rows.behavior_logps).exp().clamp(max=2.0))
)
MASKED, PROXIMAL = f"{__name__}:mask_tokens", f"{__name__}:from_proximal"
"""`icepop` with the limits in `MASKS`, and `decoupled`, where trl-replay-papers is not installed."""


def shifted(rows: Any, context: Any) -> Corrected:
    """A correction that moves advantages, by something of either sign."""
    logs = (rows.logps - rows.behavior_logps) * rows.mask
    return Corrected(rows.logps, shift=0.3 - logs.sum(dim=1))


SHIFTED = f"{__name__}:shifted"
SHIFTS: dict[str, Callable[[torch.Tensor], float]] = {
    SHIFTED: lambda logs: 0.3 - float(logs.sum()),
    "asymre": lambda logs: 0.1,
    "oapl": lambda logs: -0.5 * float(logs.sum()),
}
"""What is added to a row's advantage, from the log ratios of its tokens; `oapl` with the argument in `ARGUMENTS`."""
ARGUMENTS: dict[str, dict[str, float]] = {**MASKS, "oapl": {"beta": 0.5}}
"""Those that `train` gives corrections, so that they are seen to act."""


def far(rows: Any, context: Any) -> Corrected:
    """Old log-probs far from the new ones, to both sides, and one weight a row, written for each token."""
    old = rows.behavior_logps + distances(rows.mask.cumsum(dim=1) - 1)
    return Corrected(old, torch.where(rows.mask, 0.7, 3.0))


def distances(place: torch.Tensor) -> torch.Tensor:
    """By a token's place among those that train."""
    return 30.0 * torch.cos(place * 2.0 + 0.5) - 8.0


FAR = f"{__name__}:far"


def mask_by_hand(name: str, ratios: list[float], advantage: float, **limits: float) -> list[float]:
    """The weight of each token of a row, from the masks' definitions; limits as in `MASKS` where none are given."""
    chosen = limits or MASKS[name]
    low, high, threshold = (chosen.get(limit, math.nan) for limit in ("low", "high", "threshold"))
    inside = [low <= ratio <= high for ratio in ratios]
    geometric_mean = math.prod(ratios) ** (1 / len(ratios))
    if name == "icepop":
        return [float(near) for near in inside]
    if name == "suffix_veto":
        first = inside.index(False) if False in inside else len(inside)
        return [float(advantage >= 0 or at <= first) for at in range(len(inside))]
    if name == "outlier_mask":
        kept = all(inside)
    elif name == "k3_mask":
        kept = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios) <= threshold
    else:
        kept = low <= geometric_mean <= high
    if name == "veto_negative" and advantage >= 0:
        kept = True
    return [float(kept)] * len(ratios)


TOPR_BY_TOKEN = "topr(level='token')"
CORRECTIONS = ["ratio", "none", "truncated", "sequence_mask", "topr", "imitation"]
TOKEN_WEIGHTS = {"truncated"}
PAPERS = ["decoupled", "shaped", "gipo", "pnpo", "minpro", *MASKS]
"""Of trl-replay-papers, with `m2po`."""
PAPERS_TOKEN_WEIGHTS = {"m2po", "icepop", "suffix_veto", "decoupled", "shaped", "gipo", "pnpo", "minpro"}
OF_TOKENS = {*TOKEN_WEIGHTS, *PAPERS_TOKEN_WEIGHTS, MASKED, PROXIMAL}


TWO_LOSSES = ("grpo", "cispo")
"""The one has the gradient of ratio × weight, the other of the log-prob with both as constants."""


def allowed(
    corrections: Sequence[str], betas: Sequence[float], losses: Sequence[str] = LOSSES
) -> list[tuple[str, str, str, float]]:
    """Every `(correction, loss type, importance level, beta)` in which the correction's weights are exact."""
    return [
        (correction, loss, level, beta)
        for correction, loss, level, beta in itertools.product(corrections, losses, ("token", "sequence"), betas)
        if level == "token" or correction not in OF_TOKENS or loss == "cispo"
    ]


Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the new, behavior and old log-probs of a row's tokens and their weights to other weights."""
