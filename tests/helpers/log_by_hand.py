"""What the log of each update must have of its losses, from the rows by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from corrected import FAR, OF_TOKENS, SHIFTS
from loss_by_hand import Row, setting

UNWEIGHED = ("ratio", "none", *SHIFTS)
"""Corrections that give no weights."""


class EntropyControl:
    """TRL's control of the entropy bonus: it goes by fresh rows alone."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.adapts = bool(setting(args, "use_adaptive_entropy"))
        self.coefficient, self.mean = setting(args, "entropy_coef"), math.inf
        self.window: list[float] = []

    def applied(self) -> float:
        """The coefficient of the next loss."""
        return 0.0 if self.adapts and self.mean > self.args.entropy_target else self.coefficient

    def note(self, entropies: list[torch.Tensor], identities: list[int], ends: bool) -> None:
        """Takes those of a micro-batch's tokens by row; it `ends` a window or not."""
        of_fresh = [entropy for entropy, row in zip(entropies, identities, strict=True) if row >= 0]
        found = torch.cat([torch.zeros(0), *of_fresh]).tolist()
        if not found:
            found = [self.mean] if math.isfinite(self.mean) else torch.cat(entropies).tolist()
        self.window += found
        if ends:
            self.mean, self.window = sum(self.window) / max(len(self.window), 1), []
            step = math.copysign(self.args.entropy_coef_delta, self.args.entropy_target - self.mean)
            moved = max(self.coefficient + step, self.args.entropy_coef_min)
            self.coefficient = min(moved, self.args.entropy_coef_max)


class LossLog:
    """The sums of one update.

    Args:
        trainer: Its settings count; a `Checked` one.
        replay: The settings of replay.
    """

    def __init__(self, trainer: Any, replay: dict[str, Any]) -> None:
        args = trainer.args
        self.trainer = trainer
        self.by_row = args.importance_sampling_level == "sequence"
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.edges = {"cispo": (-math.inf, high), "sapo": None, "vespo": None}.get(
            args.loss_type, (1 - args.epsilon, 1 + high)
        )
        self.weight, self.cap = replay.get("replay_weight", 1.0), replay.get("replay_max_weight")
        self.weighs = trainer.correction not in UNWEIGHED or self.weight != 1.0 or self.cap is not None
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.squares = 0.0

    def add(self, key: str, values: Any, counted: Any = None) -> None:
        """Adds values of tokens, or of those that are `counted`."""
        values = torch.as_tensor(values).detach().double().reshape(-1)
        values = values if counted is None else values[torch.as_tensor(counted).reshape(-1)]
        total = self.sums[key]
        total[0] += float(values.sum())
        total[1] += len(values)

    def clipped(self, key: str, logs: torch.Tensor, advantage: Any, counted: torch.Tensor) -> None:
        """Adds which ratios the loss clips: of tokens, or of a row that has one ratio and one advantage."""
        if self.edges is None or not bool(counted.any()):
            return
        low, high = self.edges
        ratios, signs = logs.exp(), torch.as_tensor(advantage)
        if self.by_row:
            ratios = logs.mean().exp().expand_as(logs)
            if signs.dim() == 0:
                ratios, counted = ratios[:1], counted[:1] | True
        self.add(key, ((ratios > high) & (signs > 0)) | ((ratios < low) & (signs < 0)), counted)

    def fresh(self, row: Row) -> None:
        """Adds a fresh row, as TRL made it."""
        if not len(row.new):
            return
        logs = (row.new - row.old).detach()
        every = torch.ones_like(logs, dtype=torch.bool)
        self.add("fresh_entropy", row.entropy)
        self.clipped("fresh_clip_ratio", logs, row.advantage, every)
        if row.ref is not None:
            gap = (row.ref - row.new).detach()
            kl = gap.exp() - gap - 1
            if setting(self.trainer.args, "use_bias_correction_kl"):
                kl = kl * (logs.mean().expand_as(logs) if self.by_row else logs).exp()
            self.add("fresh_kl", kl)

    def replayed(self, row: Row, behavior: torch.Tensor, advantage: Any, given: Any, kept: Any, silent: bool) -> None:
        """Adds a replayed row.

        Args:
            row: As it trains, but with the weights of a row that is not silent.
            behavior: Its stored log-probs.
            advantage: Before a correction has moved it.
            given: The correction's weights, before limits.
            kept: Of which tokens the KL term counts; None without one.
            silent: Whether nothing of it trains.
        """
        some = len(row.new) > 0 and not silent
        weights = row.weights
        self.add("gated_fraction", float(some and self.weighs and not bool((weights != 0).any())))
        if not some:
            return
        new = row.new.detach()
        ratios = (new - behavior).double().clamp(-20, 20).exp()
        self.add("ratio_mean", ratios)
        self.add("drift_mean", ratios.log().abs())
        self.squares += float((ratios**2).sum())
        signs = torch.as_tensor(advantage).expand(len(new))
        if self.weighs:
            self.add("weight_positive", weights, signs > 0)
            self.add("weight_negative", weights, signs < 0)
        if self.cap is not None:
            capped = weights < given * self.weight * (1 - 1e-9)
            of_tokens = not self.by_row or self.trainer.correction in (FAR, *OF_TOKENS)
            self.add("capped_fraction", capped if of_tokens else capped[:1])
        trained = weights != 0 if self.weighs else torch.ones_like(new, dtype=torch.bool)
        logs = (new - row.old).double()
        self.clipped("clip_ratio", logs, advantage, trained)
        if self.by_row and self.edges is not None and bool(trained.any()):
            self.add("sequence_drift_mean", logs.mean().abs())
        if kept is not None:
            self.add("kl_dropped_fraction", ~kept, trained)

    def metrics(self) -> dict[str, float]:
        """Means, and the effective sample size, of what was there."""
        found = {key: total / count for key, (total, count) in self.sums.items() if count}
        total, count = self.sums["ratio_mean"]
        if count:
            found["ess"] = total**2 / (count * self.squares)
        return found
