"""The time that generating a batch takes, in passes of training over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

FEWEST_UPDATES = 8
"""By so many at least a cost is told."""


@dataclass(slots=True)
class Spent:
    """Seconds of some updates.

    Attributes:
        generation (`float`): Generating and scoring batches, as the trainer does without replay.
        batches (`int`): How many.
        training (`float`): All else of the updates, without what replay does between scoring and training.
        updates (`int`): How many.
    """

    generation: float = 0.0
    batches: int = 0
    training: float = 0.0
    updates: int = 0

    def since(self, before: Spent) -> Spent:
        """Return what was spent after `before`."""
        return Spent(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def passes(self, updates_per_pass: float) -> float | None:
        """Return the time of generating one batch over that of a training pass over it; None if either is unknown.

        Args:
            updates_per_pass (`float`): Updates that a pass takes; below 1 if an update trains on several batches.
        """
        if not (self.batches and self.updates and self.training > 0):
            return None
        return self.generation / self.batches / (self.training / self.updates * updates_per_pass)


class Pace:
    """Measures updates and the generation within them. The first update does not count: caches and compiled code are
    made in it. Nothing waits for a device: what a GPU has queued at the end of an update counts as generation, which
    waits for it.

    Args:
        clock (`Callable`, *optional*): Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._scored = 0.0
        self._open: Spent | None = None  # of the update at hand
        self._warm = False
        self._told = Spent()
        self.spent = Spent()

    def update_begins(self) -> None:
        """Begin to measure an update."""
        self._began, self._open, self._scored = self._clock(), Spent(), 0.0

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Measure all that happens where the trainer generates and scores."""
        started = self._clock()
        try:
            yield
        finally:
            self._scored += self._clock() - started

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Measure the trainer's own part of it."""
        started = self._clock()
        yield
        if self._open is not None:
            self._open.generation += self._clock() - started
            self._open.batches += 1

    def update_ends(self) -> None:
        """Add the update, unless it is the first."""
        if self._began is None or self._open is None:
            return
        training = self._clock() - self._began - self._scored
        if self._warm:
            self.spent.generation += self._open.generation
            self.spent.batches += self._open.batches
            self.spent.training += training
            self.spent.updates += 1
        self._warm = True
        self._began = self._open = None

    def since_last(self) -> Spent:
        """Return what was spent since the last call."""
        since = self.spent.since(self._told)
        self._told = Spent(*astuple(self.spent))
        return since
