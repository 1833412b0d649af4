"""GRPO's losses written out by hand, in float64 and row by row: what the trainer's loss is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Row:
    """One row as the loss should see it: `(T,)` tensors over its trained tokens; `weights` stands for the
    correction's."""

    new: torch.Tensor
    old: torch.Tensor
    advantage: float
    weights: torch.Tensor
    ref: torch.Tensor | None = None


def reference_loss(rows: list[Row], args: Any, max_completion_length: int) -> float:
    """The loss of one batch that is one micro-batch on one process.

    Args:
        rows (`list[Row]`): All rows, each without its masked tokens.
        args (`GRPOConfig`): The trainer's.
        max_completion_length (`int`): For dr_grpo.
    """
    kind, level = args.loss_type, args.importance_sampling_level
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    losses = []
    for row in rows:
        new, old = row.new.double(), row.old.double()
        log_ratio = new - old
        coefficient = log_ratio.exp() if level == "token" else log_ratio.mean().exp().expand_as(new)
        signal = row.weights.double() * row.advantage
        if kind == "cispo":
            policy = -coefficient.clamp(max=high) * signal * new
        elif kind == "sapo":
            temperature = args.sapo_temperature_pos if row.advantage > 0 else args.sapo_temperature_neg
            policy = -torch.sigmoid(temperature * (coefficient - 1)) * 4 / temperature * signal
        elif kind == "vespo":
            w = log_ratio.clamp(-20, 20).sum().clamp(max(-20.0, torch.tensor(1e-8).log().item()), 20).exp()
            k, rate = (
                (args.vespo_k_pos, args.vespo_lambda_pos)
                if row.advantage >= 0
                else (args.vespo_k_neg, args.vespo_lambda_neg)
            )
            policy = -(torch.tensor(rate).exp() * w**k * torch.exp(-rate * w)) * signal * new
        else:
            clipped = coefficient.clamp(1 - low, 1 + high)
            policy = -torch.minimum(coefficient * signal, clipped * signal)
        if row.ref is not None:
            gap = row.ref.double() - new
            divergence = gap.exp() - gap - 1
            if args.use_bias_correction_kl:
                divergence = divergence * coefficient
            policy = policy + args.beta * divergence * (row.weights != 0)
        losses.append(policy)
    tokens = sum(len(loss) for loss in losses)
    total = sum(loss.sum() for loss in losses)
    if kind in ("grpo", "sapo"):
        return float(torch.stack([loss.mean() for loss in losses]).mean())
    if kind == "dr_grpo":
        return float(total / (len(rows) * max_completion_length))
    if kind == "luspo":
        return float(total / len(rows))
    return float(total / tokens)
