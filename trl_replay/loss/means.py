"""Sums over what the loss has seen since the last log, kept on the training device until then."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from ..base.transfer import fetch


class Means:
    """Sums and counts by the name of a metric."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, values: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Note values, of a number type or bool, where `mask`, bool of the same shape, is set; None if all are 0."""
        count = mask.sum()
        total = torch.zeros_like(count) if values is None else torch.where(mask, values.float(), 0.0).sum()
        self._sums.setdefault(name, []).extend((total, count))

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the sums since the last call, `()` each: of each name, totals and counts in turn."""
        sums, self._sums = self._sums, {}
        return sums

    @staticmethod
    def metrics(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the means of what was taken, once it is fetched; none where nothing was seen."""
        found = {}
        for name, values in sums.items():
            total, count = torch.tensor(values, dtype=torch.float32).view(-1, 2).sum(dim=0).tolist()
            if count:
                found[name] = total / count
        return found


def fetch_sums(taken: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> list[dict[str, list[float]]]:
    """Fetch what several collectors have taken, in one copy from the device."""
    lists = [sums for of_one in taken for sums in of_one.values()]
    tensors = [tensor.reshape(-1) for sums in lists for tensor in sums]
    if not tensors:
        return [{} for _ in taken]
    numbers = iter(fetch({0: torch.cat(tensors).double()})[0].tolist())
    return [
        {name: list(itertools.islice(numbers, sum(map(torch.numel, sums)))) for name, sums in of_one.items()}
        for of_one in taken
    ]
