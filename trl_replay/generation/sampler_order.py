"""The order in which the trainer's own sampler gives prompts, where it is not TRL's shuffling."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import compat
from ..base.generators import global_generators_kept


class Place(NamedTuple):
    """A place in an order."""

    order: Sequence[int]
    """Row numbers of the dataset."""
    start: int
    """The first row behind a generation batch."""


class SamplerOrder:
    """Follows the trainer's sampler. Where that can't be done, a warning says so at attach, and new prompts come in a
    random order.

    Args:
        trainer (`Callable`): Gives the trainer.
        seed (`int`): What a sampler draws from that has no generator of its own; the same on all processes.
    """

    def __init__(self, trainer: Callable[[], Any], seed: int) -> None:
        self._trainer = trainer
        self._seed = seed
        self._order: Sequence[int] | None = None
        self._of: tuple[Any, int] | None = None
        self._can_follow = True
        self._at = (-1, 0)
        self._read(epoch=0)

    def place(self, groups: int) -> Place | None:
        """Return the place behind the generation batch that begins now; None where TRL shuffles.

        Args:
            groups (`int`): Of a batch, on all processes.
        """
        update = self._trainer().state.global_step
        self._at = update, self._at[1] + 1 if self._at[0] == update else 0  # several batches may begin in one update
        batch = compat.generation_batch(self._trainer()) + self._at[1]
        self._read(epoch=0)
        if not self._order:
            return None
        batches = max(len(self._order) // groups, 1)  # TRL leaves the rest of an epoch out
        self._read(batch // batches)
        return Place(self._order, (batch % batches + 1) * groups)

    def _read(self, epoch: int) -> None:
        """Take the order of an epoch: a sampler's may change."""
        dataset, _ = compat.training_data(self._trainer())
        if not self._can_follow or compat.streams(dataset) or self._of == (id(dataset), epoch):
            return
        self._of = id(dataset), epoch
        try:
            with global_generators_kept(self._seed + epoch):
                self._order = compat.prompt_order(self._trainer(), dataset)
        except Exception as error:  # a user's sampler may raise anything
            self._can_follow, self._order = False, None
            warnings.warn(
                f"The trainer's sampler can't be followed ({type(error).__name__}: {error}): new prompts come in a "
                "random order. If the order matters, set replay_refill_prompts='same'.",
                stacklevel=2,
            )
