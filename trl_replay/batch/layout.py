"""How a GRPOTrainer lays out its batches, and where its loss is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import compat
from ..compat import HIGH_ENTROPY, PREPARE, SEAM
from ..data.types import Batch


class Dialect:
    """TRL's. Those of other trainers derive from it.

    Attributes:
        runs_model (`bool`): Whether an engine of its own runs the model, so that `attach` does not try it.
        around (`Mapping[str, Callable]`): What stands around methods of its own, by name: called with the session,
            the trainer, its method, and the arguments.
    """

    runs_model = False
    around: Mapping[str, Callable[..., Any]] = {}

    def problems(self, trainer: Any) -> list[str]:
        """Return what the trainer lacks, beside TRL's contract: reasons of a `ContractError`."""
        return []

    def untested(self, trainer: Any) -> Iterable[str]:
        """Return reasons to refuse the trainer."""
        return ()

    def check(self, trainer: Any) -> None:
        """Try the trainer's loss; raise a `ContractError` if it is not the known one."""

    def seam(self, trainer: Any, iterates: bool) -> list[str]:
        """Return the names of the methods to wrap; `iterates`: with `replay_iterations="replay"`."""
        entropy = [HIGH_ENTROPY] if compat.chooses_by_entropy(trainer) else []
        return [*SEAM, *entropy, *([PREPARE] if iterates else [])]

    def incoming(self, trainer: Any, batch: Batch) -> Batch:
        """Return a batch that the trainer scored as TRL lays it out."""
        return batch

    def outgoing(self, trainer: Any, batch: Batch) -> Batch:
        """Return a composed batch as the trainer lays it out."""
        return batch

    def in_loss(self, trainer: Any, micro: Batch) -> Batch:
        """Return the keys of a micro-batch that stock's loss reads in another layout."""
        return {}

    def forward_logps(self, trainer: Any, batch: Batch) -> torch.Tensor | None:
        """Return log-probs of a batch in TRL's layout: `compat.forward_logps`."""
        return compat.forward_logps(trainer, batch)
