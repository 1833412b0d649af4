"""Progress of training: the updates done, and what failed on this process that the others have not heard of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Counts optimizer updates.

    Attributes:
        update (`int`): Updates so far.
        planned (`int`): Updates of the run that is being trained; 0 if that is not known.
    """

    update: int = 0
    planned: int = 0


class KeptErrors:
    """Keeps what fails on this process until all processes stop together, at the next `agree`.

    Args:
        alone (`bool`): There is no other process: errors are raised at once.

    Attributes:
        first (`Exception`, *optional*): What is kept.
    """

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.first: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Keep an error; an earlier one stays."""
        if self.alone:
            raise error
        self.first = self.first or error

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what fails inside."""
        try:
            yield
        except Exception as caught:
            self.keep(caught)

    def take(self) -> Exception | None:
        """The kept error, which is forgotten here."""
        error, self.first = self.first, None
        return error

    def raise_kept(self) -> None:
        """Raise the kept error, which is forgotten here; without one, do nothing."""
        error = self.take()
        if error is not None:
            raise error
