"""What the loss showed of replayed rows: how far the policy has moved from them, and what they still teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..types import LOG_RATIO_LIMIT, Floats, ReplayedRows

STATS = ("seen", "ratio", "squares", "drift", "remaining_signal")
"""Sums over a replayed row's trained tokens: of 1, r, r², |log r| and min(r, 1) |A|, with r the importance ratio."""
RENAMED = {"mass": "remaining_signal"}
"""Names in checkpoints of earlier releases."""


class OffPolicyStats:
    """Collects the figures of a generation batch's replayed rows, and of all rows since the last log.

    They stay on the training device until somebody asks.
    """

    def __init__(self) -> None:
        self._since_log: list[torch.Tensor] = []
        self._rows: list[tuple[list[int], torch.Tensor]] = []
        self._restored: dict[str, Floats] = {}

    def add(
        self,
        positions: Sequence[int],
        rows: ReplayedRows,
        weights: torch.Tensor | None,
    ) -> None:
        """Notes one micro-batch.

        Args:
            positions (`Sequence[int]`): Of each replayed row, its place in this process's generation batch.
            rows ([`ReplayedRows`]): What the tap saw.
            weights (`(R,)` or `(R, C)`, *optional*): What the policy term is multiplied by.
        """
        logs = (rows.logps.float() - rows.behaviour_logps.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        mask, ratios = rows.mask.double(), logs.exp()
        remaining_signal = ratios.clamp(max=1.0) * rows.advantages.double().abs().unsqueeze(1)
        each = (
            torch.ones_like(ratios),
            ratios,
            ratios**2,
            logs.abs(),
            remaining_signal,
        )
        stats = torch.stack([(value * mask).sum(dim=1) for value in each], dim=1)
        self._rows.append((list(positions), stats))
        weightless = logs.new_zeros(()) if weights is None else weights.eq(0).view(len(positions), -1).all(dim=1).sum()
        counts = torch.stack([weightless.double(), logs.new_tensor(len(positions))])
        self._since_log.append(torch.cat([stats.sum(dim=0), counts]))

    def metrics(self) -> dict[str, float]:
        """Metrics of the replayed rows trained on since the last call; none if there were none."""
        if not self._since_log:
            return {}
        seen, ratio, squares, drift, _, weightless, rows = torch.stack(self._since_log).sum(dim=0).tolist()
        self._since_log = []
        values = {"replay/gated_fraction": weightless / rows}
        if seen:
            values |= {
                "replay/ratio_mean": ratio / seen,
                "replay/ess": ratio * ratio / (seen * squares),
            }
            values["replay/drift_mean"] = drift / seen
        return values

    def columns(self, count: int) -> dict[str, Floats]:
        """`STATS` of the last generation batch's `count` rows on this process, as float64 columns."""
        table: Floats = np.zeros((count, len(STATS)))
        for positions, stats in self._rows:
            np.add.at(table, positions, stats.cpu().numpy())
        told = {name: table[:, number] for number, name in enumerate(STATS)}
        return {name: column + self._restored.get(name, 0.0) for name, column in told.items()}

    def clear(self) -> None:
        """The next generation batch begins."""
        self._rows, self._restored = [], {}

    def state_dict(self, count: int) -> dict[str, list[float]]:
        """What a checkpoint keeps of the last generation batch's `count` rows: see `columns`."""
        return {name: column.tolist() for name, column in self.columns(count).items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes what `state_dict` gave."""
        self._rows = []
        self._restored = {RENAMED.get(name, name): np.asarray(column, np.float64) for name, column in state.items()}


def effective_share(columns: Mapping[str, Any]) -> float | None:
    """The effective sample size of the replayed tokens as a share of their number; None if there were none."""
    seen, ratio, squares = (float(np.sum(columns[name])) for name in ("seen", "ratio", "squares"))
    return ratio * ratio / (seen * squares) if seen else None
