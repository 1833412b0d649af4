"""Means over what the loss has seen since the last log, kept on the training device until then."""

from __future__ import annotations

import torch

from ..base.transfer import fetch


class Means:
    """Sums and counts by the name of a metric."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Note values, of a number type or bool, where `mask`, bool of the same shape, is set."""
        total = torch.where(mask, values.float(), 0.0).sum()
        sums = self._sums.setdefault(name, [])
        sums.append(torch.stack([total, mask.sum().float()]))

    def metrics(self) -> dict[str, float]:
        """Means since the last call; none where nothing was seen."""
        sums = {name: torch.stack(noted).sum(dim=0) for name, noted in self._sums.items()}
        self._sums = {}
        found = {name: total.tolist() for name, total in fetch(sums).items()}
        return {name: total / count for name, (total, count) in found.items() if count}
