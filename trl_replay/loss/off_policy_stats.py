"""Statistics of replayed rows in the loss: how far the policy has moved from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..transfer import fetch
from ..types import LOG_RATIO_LIMIT, Floats, ReplayedRows

STATS = ("seen", "drift")
"""What is kept of each replayed row: sums over its trained tokens of 1 and of |log r|, with r the importance ratio."""


class OffPolicyStats:
    """Collects the figures of a generation batch's replayed rows, and of all rows since the last log.

    They stay on the training device until somebody asks.
    """

    def __init__(self) -> None:
        self._since_log: list[torch.Tensor] = []
        self._rows: list[tuple[list[int], torch.Tensor]] = []
        self._restored: dict[str, Floats] = {}

    def add(self, positions: Sequence[int], rows: ReplayedRows, weights: torch.Tensor | None) -> None:
        """Notes one micro-batch.

        Args:
            positions (`Sequence[int]`): Of each replayed row, its place in this process's generation batch.
            rows ([`ReplayedRows`]): What the tap saw.
            weights (`(R,)` or `(R, C)`, *optional*): What the policy term is multiplied by.
        """
        mask = rows.mask.double()

        def over_tokens(values: torch.Tensor) -> torch.Tensor:
            """`(R,)`, and `values` are changed: one after the other, so that few are there at a time."""
            return values.mul_(mask).sum(dim=1)

        logs = rows.logps.float() - rows.behavior_logps.float()
        logs = logs.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        ratios = logs.exp()
        drift = over_tokens(logs.abs_())
        squares = over_tokens(ratios**2)
        ratio = over_tokens(ratios)
        seen = mask.sum(dim=1)
        of_rows = torch.stack([seen, drift], dim=1)  # (R, len(STATS))
        self._rows.append((list(positions), of_rows))
        count = mask.new_tensor(len(positions))
        weightless = torch.zeros_like(count)
        if weights is not None:
            silent = weights.eq(0).view(len(positions), -1)
            weightless = silent.all(dim=1).sum().double()
        over_rows = torch.stack([seen, ratio, squares, drift], dim=1).sum(dim=0)
        counts = torch.stack([weightless, count])
        self._since_log.append(torch.cat([over_rows, counts]))

    def metrics(self) -> dict[str, float]:
        """Metrics of the replayed rows trained on since the last call; none if there were none."""
        if not self._since_log:
            return {}
        sums = torch.stack(self._since_log).sum(dim=0)
        self._since_log = []
        seen, ratio, squares, drift, weightless, rows = sums.tolist()
        values = {"replay/gated_fraction": weightless / rows}
        if seen:
            values["replay/ratio_mean"] = ratio / seen
            values["replay/ess"] = ratio * ratio / (seen * squares)
            values["replay/drift_mean"] = drift / seen
        return values

    def columns(self, count: int) -> dict[str, Floats]:
        """`STATS` of the last generation batch's `count` rows on this process, as float64 columns."""
        table: Floats = np.zeros((count, len(STATS)))
        found = fetch({number: stats for number, (_, stats) in enumerate(self._rows)})
        for number, (positions, _) in enumerate(self._rows):
            np.add.at(table, positions, found[number].numpy())
        columns = {}
        for number, name in enumerate(STATS):
            restored = self._restored.get(name, 0.0)
            columns[name] = table[:, number] + restored
        return columns

    def clear(self) -> None:
        """The next generation batch begins."""
        self._rows = []
        self._restored = {}

    def state_dict(self, count: int) -> dict[str, list[float]]:
        """Returns what a checkpoint keeps of the last generation batch's `count` rows: see `columns`."""
        columns = self.columns(count)
        return {name: column.tolist() for name, column in columns.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes what `state_dict` gave."""
        self.clear()
        for name, column in state.items():
            self._restored[name] = np.asarray(column, np.float64)
