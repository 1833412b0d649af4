"""Statistics of replayed rows in the loss: how far the policy has moved from them, and a watch over what corrections
and gates leave of them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from ..data.counters import DRIFT, GATED
from ..data.types import LOG_RATIO_LIMIT, ReplayedRows

UPDATES, NEARLY_ALL = 8, 0.95
"""Updates with replayed rows, and the share of these rows without any weight at which it is told."""


class OffPolicyStats:
    """Collects the figures of all replayed rows since the last log.

    They stay on the training device until somebody asks.
    """

    def __init__(self) -> None:
        self._since_log: list[torch.Tensor] = []
        self._rows = 0

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
        weightless = ratio.new_zeros(())
        if weights is not None:
            silent = weights.eq(0).view(len(mask), -1) | ~rows.mask
            weightless = (silent.all(dim=1) & rows.mask.any(dim=1)).sum()
        self._since_log.append(torch.stack([mask.sum(), ratio, squares, drift, weightless]))
        self._rows += len(mask)

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the sums since the last call, `(5,)` each; none if there were none."""
        sums, self._since_log = self._since_log, []
        return {"": sums} if sums else {}

    def metrics(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the metrics of the replayed rows of what was taken, once it is fetched."""
        if not sums:
            return {}
        tokens, ratio, squares, drift, weightless = (
            torch.tensor(sums[""], dtype=torch.float64).view(-1, 5).sum(dim=0).tolist()
        )
        values = {"replay/gated_fraction": weightless / self._rows}
        self._rows = 0
        if tokens:
            values["replay/ratio_mean"] = ratio / tokens
            values["replay/ess"] = ratio * ratio / (tokens * squares)
            values["replay/drift_mean"] = drift / tokens
        return values


class MaskWatch:
    """Warns once where nearly all replayed rows of several updates were masked.

    Args:
        told (`str`): What masks them, and the remedy; empty where that is meant.
    """

    def __init__(self, told: str) -> None:
        self._told = told
        self._shares: deque[float] = deque(maxlen=UPDATES)
        self._has_warned = not told

    def __call__(self, measured: Mapping[str, float]) -> None:
        """Take note of an update's metrics; those without replayed rows tell nothing."""
        if self._has_warned or GATED not in measured:
            return
        self._shares.append(measured[GATED])
        share = sum(self._shares) / UPDATES
        if share >= NEARLY_ALL:
            self._has_warned = True
            drift = measured.get(DRIFT, 0.0)
            warnings.warn(
                f"Of the rows replayed in {UPDATES} updates, {share:.0%} were masked, so that replay teaches nothing "
                f"(mean |log ratio|: {drift:.2g}): {self._told}",
                stacklevel=2,
            )
