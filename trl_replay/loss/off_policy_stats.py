"""Statistics of replayed rows in the loss: how far the policy has moved from them."""

from __future__ import annotations

import torch

from ..data.types import LOG_RATIO_LIMIT, ReplayedRows


class OffPolicyStats:
    """Collects the figures of all replayed rows since the last log.

    They stay on the training device until somebody asks.
    """

    def __init__(self) -> None:
        self._since_log: list[torch.Tensor] = []

    def add(self, rows: ReplayedRows, weights: torch.Tensor | None) -> None:
        """Note one micro-batch.

        Args:
            rows ([`ReplayedRows`]): What the tap saw.
            weights (`(R,)` or `(R, C)`, *optional*): What the policy term is multiplied by.
        """
        mask = rows.mask.double()

        def over_tokens(values: torch.Tensor) -> torch.Tensor:
            """`values` are changed: one after the other, so that few are there at a time."""
            return values.mul_(mask).sum()

        logs = rows.logps.float() - rows.behavior_logps.float()
        logs = logs.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        ratios = logs.exp()
        drift = over_tokens(logs.abs_())
        squares = over_tokens(ratios**2)
        ratio = over_tokens(ratios)
        count = mask.new_tensor(len(mask))
        weightless = torch.zeros_like(count)
        if weights is not None:
            silent = weights.eq(0).view(len(mask), -1) | ~rows.mask
            weightless = (silent.all(dim=1) & rows.mask.any(dim=1)).sum().double()
        self._since_log.append(torch.stack([mask.sum(), ratio, squares, drift, weightless, count]))

    def metrics(self) -> dict[str, float]:
        """Metrics of the replayed rows trained on since the last call; none if there were none."""
        if not self._since_log:
            return {}
        sums = torch.stack(self._since_log).sum(dim=0)
        self._since_log = []
        tokens, ratio, squares, drift, weightless, rows = sums.tolist()
        values = {"replay/gated_fraction": weightless / rows}
        if tokens:
            values["replay/ratio_mean"] = ratio / tokens
            values["replay/ess"] = ratio * ratio / (tokens * squares)
            values["replay/drift_mean"] = drift / tokens
        return values
