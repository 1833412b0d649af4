"""GRPO's loss and its variants from their papers, row by row in plain Python, and the log-probs that they need.

No code of TRL's or of trl_replay's is in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from releases import SCALES_BY_BATCH

IMAGES = ("pixel_values", "image_grid_thw")
"""What a model takes of images."""


def forward(
    trainer: Any, rows: list[dict[str, Any]], micro: Any, model: Any = None, gradients: bool = False
) -> tuple[list[Any], list[Any], Any]:
    """Log-probs and entropies of every row's completion, and the MoE auxiliary loss, from the plain model."""
    left, right = micro["prompt_ids"].size(1), micro["completion_ids"].size(1)
    device = next(trainer.model.parameters()).device
    ids = torch.full((len(rows), left + right), trainer._tokenizer.pad_token_id, device=device)
    attention = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        begin, end = left - len(row["prompt"]), left + len(row["ids"])
        ids[number, begin:left], ids[number, left:end] = row["prompt"], row["ids"]
        attention[number, begin:left], attention[number, left:end] = 1, row["attention"]
    extra = {"output_router_logits": True} if setting(trainer, "aux_loss_enabled") else {}
    if len(rows) == 1 and "images" in rows[0]:
        types = torch.cat([rows[0]["types"], torch.zeros_like(rows[0]["ids"])])
        extra |= {**{key: rows[0]["images"][key] for key in IMAGES}, "mm_token_type_ids": types[None]}
    elif hasattr(trainer.model.config, "vision_config"):  # or it takes positions of the last generation
        extra["position_ids"] = torch.arange(left + right).expand(3, len(rows), -1)
    with torch.set_grad_enabled(gradients):
        out = (model or trainer.model)(input_ids=ids, attention_mask=attention, **extra)
    logps = torch.log_softmax(out.logits[:, left - 1 : -1].float() / trainer.args.temperature, dim=-1)
    chosen = logps.gather(-1, ids[:, left:].unsqueeze(-1)).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    cut = [len(row["ids"]) for row in rows]
    return (
        [chosen[number, :length] for number, length in enumerate(cut)],
        [entropy[number, :length] for number, length in enumerate(cut)],
        getattr(out, "aux_loss", 0.0) if extra else 0.0,
    )


def forward_alone(trainer: Any, rows: list[dict[str, Any]], gradients: bool = False) -> tuple[list[Any], list[Any]]:
    """Log-probs and entropies of every row's completion, from a forward of its own without any padding."""
    found = []
    for row in rows:
        unpadded = {"prompt_ids": row["prompt"][None], "completion_ids": row["ids"][None]}
        found.append(forward(trainer, [row], unpadded, gradients=gradients))
    return [logps for (logps,), _, _ in found], [entropies for _, (entropies,), _ in found]


@dataclass
class Row:
    """One row as the loss should see it: `(T,)` tensors over the tokens that it trains on.

    Attributes:
        new: Log-probs under the policy being trained.
        old: What the importance ratio is taken to.
        advantage: One number, or one for each token.
        weights: What the correction and the gates multiply the policy term by; None is 1.
        ref: Log-probs of the reference model, where there is one.
        entropy: Of the policy at each token.
        sampling: What the sampler reported, NaN where it could not tell; None: it agreed with `old`.
        sampler_ratio: `(T,)` or `(1,)`, the ratio between trainer and sampler.
    """

    new: torch.Tensor
    old: torch.Tensor
    advantage: Any
    weights: torch.Tensor | None = None
    ref: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    sampling: torch.Tensor | None = None
    sampler_ratio: torch.Tensor | None = None


def reference_loss(trainer: Any, rows: list[Row], *others: Any, **named: Any) -> float:
    """The value of `differentiable_loss`."""
    return float(differentiable_loss(trainer, rows, *others, **named).detach())


def differentiable_loss(
    trainer: Any,
    rows: list[Row],
    items: int | None = None,
    aux: Any = 0.0,
    count: float | None = None,
    beside: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The loss of one micro-batch, as the papers have it, with the gradient of `Row.new` and `Row.entropy`.

    Args:
        trainer: Its settings count; nothing is computed by it. `reference_kind` of a subclass is its kind of loss.
        rows: All rows of the micro-batch that count.
        items: Trained tokens of the generation batch; None: those of the rows.
        aux: The routers' auxiliary loss.
        count: What a mean over rows is divided by; None: the number of rows.
        beside: Entropies of rows that do not count, but for the quantile of all.
    """
    args, kind = trainer.args, getattr(trainer, "reference_kind", None) or trainer.args.loss_type
    threshold = entropy_threshold(args, rows, beside or [])
    sums, lengths, entropies, kept_tokens = [], [], torch.zeros(()), 0.0
    count = len(rows) if count is None else count
    for row in rows:
        length = len(row.new)
        lengths.append(length)
        keep = torch.ones(length) if threshold is None else (row.entropy >= threshold).double()
        if row.entropy is not None:
            entropies = entropies + (row.entropy * keep).sum()
            kept_tokens += float(keep.sum())
        sums.append(row_loss(trainer, kind, row, keep) if length else 0.0)
    steps = trainer.current_gradient_accumulation_steps
    if kind in ("grpo", "sapo"):
        total = sum(value / max(length, 1) for value, length in zip(sums, lengths, strict=True)) / count / steps
    elif kind == "bnpo":
        total = sum(sums) / max(sum(lengths), 1) / steps
    elif kind == "dr_grpo":
        total = sum(sums) / (count * trainer.max_completion_length) / steps
    elif kind in ("luspo", "gmpo"):
        total = sum(sums) / count / steps
    else:
        window = 1 if SCALES_BY_BATCH else steps / args.steps_per_generation
        total = sum(sums) / (max(sum(lengths) if items is None else items, 1) * window)
    if setting(args, "entropy_coef") or setting(args, "use_adaptive_entropy"):
        total = total - trainer.applied_entropy_coef * entropies / max(kept_tokens, 1) / steps
    return torch.as_tensor(total + aux * setting(trainer, "router_aux_loss_coef") / steps)


def entropy_threshold(args: Any, rows: list[Row], beside: list[torch.Tensor]) -> float | None:
    """With `top_entropy_quantile`, the entropy from which on a token is trained on; NaN where several have it but
    for rounding, whose last bit decides then: tokens of one context have one entropy."""
    known = [*beside, *(row.entropy for row in rows if row.entropy is not None)]
    if args.top_entropy_quantile >= 1.0 or not known:
        return None
    of_tokens = torch.cat(known).detach()
    found = torch.quantile(of_tokens, 1 - args.top_entropy_quantile)
    return math.nan if int(((of_tokens - found).abs() < 1e-5).sum()) > 1 else float(found)


def row_loss(trainer: Any, kind: str, row: Row, keep: torch.Tensor) -> torch.Tensor:
    """The sum of one row's token losses; for GMPO the row's loss."""
    args, new, old = trainer.args, row.new.double(), row.old.double()
    weights = torch.ones_like(new) if row.weights is None else row.weights.double()
    log_ratio = new - old
    token_level = args.importance_sampling_level == "token"
    ratio = (log_ratio if token_level else log_ratio.mean().expand(len(new))).exp()
    if kind == "gmpo":
        return -geometric_mean(args, log_ratio, row.advantage).exp() * row.advantage
    loss = token_losses(args, kind, ratio, log_ratio, weights, row)
    if args.off_policy_mask_threshold is not None:
        sampler = old if row.sampling is None else row.sampling.double()
        drift = torch.nan_to_num(sampler - new.detach(), nan=0.0)  # vLLM could not tell
        is_near = drift.mean() <= args.off_policy_mask_threshold
        loss = torch.where((torch.as_tensor(row.advantage) >= 0) | is_near, loss, 0.0)
    loss = loss * keep
    if row.sampler_ratio is not None and kind != "vespo":
        loss = loss * row.sampler_ratio.double()
    if trainer.beta:
        assert row.ref is not None
        gap = row.ref.double() - new
        kl = gap.exp() - gap - 1
        kl = kl * ratio if setting(args, "use_bias_correction_kl") else kl
        kl = kl.clamp(max=getattr(trainer, "most_kl", math.inf))
        loss = loss + trainer.beta * torch.where(weights != 0, kl, 0.0)
    return loss.sum()


def setting(owner: Any, name: str) -> Any:
    """Turns off what a release does not have yet."""
    return getattr(owner, name, None) or 0.0


def geometric_mean(args: Any, log_ratio: Any, advantage: float) -> Any:
    """GMPO: the mean of a row's log ratios, each clipped to the side that the advantage would push it."""
    clipped = log_ratio.clamp(-args.epsilon, args.epsilon_high if args.epsilon_high is not None else args.epsilon)
    return (torch.minimum(log_ratio, clipped) if advantage > 0 else torch.maximum(log_ratio, clipped)).mean()


def token_losses(args: Any, kind: str, ratio: Any, log_ratio: Any, weights: torch.Tensor, row: Row) -> Any:
    """The policy loss of each trained token of one row."""
    low, high = args.epsilon, args.epsilon_high if args.epsilon_high is not None else args.epsilon
    new, advantage = row.new.double(), torch.as_tensor(row.advantage, dtype=torch.float64)
    signal = weights * advantage
    if kind == "cispo":
        return -ratio.clamp(max=high).detach() * signal * new
    if kind == "sapo":
        temperature = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * signal
    if kind == "vespo":
        total = log_ratio.detach().clamp(-20, 20).sum()
        if row.sampler_ratio is not None:
            total = total + row.sampler_ratio.double().log().clamp(math.log(1e-8), 20).sum()
        total = float(total.clamp(math.log(1e-8), 20))
        power = torch.where(advantage >= 0, args.vespo_k_pos, args.vespo_k_neg)
        rate = torch.where(advantage >= 0, args.vespo_lambda_pos, args.vespo_lambda_neg)
        return -(rate + power * total - rate * math.exp(total)).exp() * signal * new
    clipped = ratio.clamp(1 - low, 1 + high)
    unclipped = ratio if args.delta is None else ratio.clamp(max=args.delta)
    return -torch.minimum(unclipped * signal, clipped * signal)
