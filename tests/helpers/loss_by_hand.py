"""GRPO's loss and its variants from their papers, row by row in plain Python, and the log-probs that they need.

No code of TRL's or of trl_replay's is in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from releases import SCALES_BY_BATCH


def forward(
    trainer: Any, rows: list[dict[str, Any]], micro: Any, model: Any = None
) -> tuple[list[Any], list[Any], Any]:
    """Log-probs and entropies of every row's completion, and the MoE auxiliary loss, from the plain model."""
    left, right = micro["prompt_ids"].size(1), micro["completion_ids"].size(1)
    ids = torch.full((len(rows), left + right), trainer._tokenizer.pad_token_id)
    attention = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        begin, end = left - len(row["prompt"]), left + len(row["ids"])
        ids[number, begin:left], ids[number, left:end] = row["prompt"], row["ids"]
        attention[number, begin:left], attention[number, left:end] = 1, row["attention"]
    extra = {"output_router_logits": True} if setting(trainer, "aux_loss_enabled") else {}
    with torch.no_grad():
        out = (model or trainer.model)(input_ids=ids, attention_mask=attention, **extra)
    logps = torch.log_softmax(out.logits[:, left - 1 : -1].float(), dim=-1)
    chosen = logps.gather(-1, ids[:, left:].unsqueeze(-1)).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    cut = [len(row["ids"]) for row in rows]
    return (
        [chosen[number, :length] for number, length in enumerate(cut)],
        [entropy[number, :length] for number, length in enumerate(cut)],
        getattr(out, "aux_loss", 0.0) if extra else 0.0,
    )


def reference_loss(
    trainer: Any, rows: list[dict[str, Any]], logps: list[Any], entropies: list[Any] | None, aux: Any, items: int
) -> float:
    """The loss of one micro-batch, as the papers have it."""
    args, kind = trainer.args, trainer.reference_kind or trainer.loss_type
    threshold = None
    if args.top_entropy_quantile < 1.0 and entropies is not None:
        taken = torch.cat([entropy[row["mask"]] for entropy, row in zip(entropies, rows, strict=True)])
        threshold = float(torch.quantile(taken, 1 - args.top_entropy_quantile))
    sums, lengths, kept_entropy = [], [], []
    for number, row in enumerate(rows):
        mask, advantage = row["mask"], row["advantage"]
        new, old = logps[number].double()[mask], row["old_per_token_logps"].double()[mask]
        advantage = advantage[mask] if torch.is_tensor(advantage) else advantage
        length = len(new)
        lengths.append(length)
        keep = torch.ones(length) if threshold is None else (entropies[number][mask] >= threshold).double()  # type: ignore[index]
        if entropies is not None:
            kept_entropy.append((entropies[number][mask] * keep, keep))
        if length == 0:
            sums.append(0.0)
            continue
        log_ratio = new - old
        ratio = (log_ratio if args.importance_sampling_level == "token" else log_ratio.mean().expand(length)).exp()
        if kind == "gmpo":
            sums.append(float(-geometric_mean(args, log_ratio, advantage).exp() * advantage))
            continue
        loss = token_losses(args, kind, ratio, log_ratio, advantage, new, row)
        if args.off_policy_mask_threshold is not None and advantage < 0:
            sampler = row.get("sampling_per_token_logps", row["old_per_token_logps"]).double()[mask]
            sampler = torch.where(sampler.isnan(), old, sampler)  # vLLM could not tell: as the policy of that time
            loss = loss * float((sampler - new).mean() <= args.off_policy_mask_threshold)
        loss = loss * keep
        if "importance_sampling_ratio" in row and kind != "vespo":
            given = row["importance_sampling_ratio"].double().nan_to_num(nan=1.0)
            loss = loss * (given if row["ratio_width"] == 1 else given[mask])
        if trainer.beta:
            gap = row["ref_per_token_logps"].double()[mask] - new
            kl = gap.exp() - gap - 1
            loss = loss + trainer.beta * (kl * ratio if args.use_bias_correction_kl else kl)
        sums.append(float(loss.sum()))
    steps = trainer.current_gradient_accumulation_steps
    if kind in ("grpo", "sapo"):
        total = sum(value / max(length, 1) for value, length in zip(sums, lengths, strict=True)) / len(rows) / steps
    elif kind == "bnpo":
        total = sum(sums) / max(sum(lengths), 1) / steps
    elif kind == "dr_grpo":
        total = sum(sums) / (len(rows) * trainer.max_completion_length) / steps
    elif kind in ("luspo", "gmpo"):
        total = sum(sums) / len(rows) / steps
    else:
        total = sum(sums) / (max(items, 1) * (1 if SCALES_BY_BATCH else steps / args.steps_per_generation))
    if setting(args, "entropy_coef") or setting(args, "use_adaptive_entropy"):
        value = sum(float(entropy.sum()) for entropy, _ in kept_entropy)
        bonus = value / max(sum(float(keep.sum()) for _, keep in kept_entropy), 1) / steps
        total -= trainer.applied_entropy_coef * bonus
    return total + float(aux) * setting(trainer, "router_aux_loss_coef") / steps


def setting(owner: Any, name: str) -> Any:
    """What a release does not have yet is off in it."""
    return getattr(owner, name, None) or 0.0


def geometric_mean(args: Any, log_ratio: Any, advantage: float) -> Any:
    """GMPO: the mean of a row's log ratios, each clipped to the side that the advantage would push it."""
    clipped = log_ratio.clamp(-args.epsilon, args.epsilon_high if args.epsilon_high is not None else args.epsilon)
    return (torch.minimum(log_ratio, clipped) if advantage > 0 else torch.maximum(log_ratio, clipped)).mean()


def token_losses(
    args: Any, kind: str, ratio: Any, log_ratio: Any, advantage: float, new: Any, row: dict[str, Any]
) -> Any:
    """The loss of each trainable token of one row."""
    low, high = args.epsilon, args.epsilon_high if args.epsilon_high is not None else args.epsilon
    if kind == "cispo":
        return -ratio.clamp(max=high) * advantage * new
    if kind == "sapo":
        temperature = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
    if kind == "vespo":
        weight = log_ratio.clamp(-20, 20).sum()
        if "importance_sampling_ratio" in row:
            given = row["importance_sampling_ratio"].double()
            weight = weight + given.log().clamp(math.log(1e-8), 20).sum()
        weight = float(weight.clamp(math.log(1e-8), 20))
        power, rate = (
            (args.vespo_k_pos, args.vespo_lambda_pos) if advantage >= 0 else (args.vespo_k_neg, args.vespo_lambda_neg)
        )
        return -math.exp(rate + power * weight - rate * math.exp(weight)) * advantage * new
    clipped = ratio.clamp(1 - low, 1 + high)
    unclipped = ratio if args.delta is None else ratio.clamp(max=args.delta)
    return -torch.minimum(unclipped * advantage, clipped * advantage)
