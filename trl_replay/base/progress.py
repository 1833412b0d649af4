"""Progress of training: the updates done, and what failed on this process that the others have not heard of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .transfer import Copies, begin

if TYPE_CHECKING:
    import torch

RaiseFor: TypeAlias = Callable[[Any], None]
Check: TypeAlias = "Callable[[torch.Tensor, RaiseFor], None]"


def check_at_once(verdicts: torch.Tensor, raise_for: RaiseFor) -> None:
    """Have a look at what the loss has computed: [`KeptErrors.check`]."""
    raise_for(verdicts.tolist())


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
        defers (`bool`): Whether checks of what the loss computes wait until the optimizer is about to step.
    """

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.first: Exception | None = None
        self.defers = False
        self._due: list[tuple[Copies[int], RaiseFor]] = []

    def check(self, verdicts: torch.Tensor, raise_for: RaiseFor) -> None:
        """Have a look at what the loss has computed: at once, or, where it `defers`, before the optimizer steps, so
        that nothing waits for the device in the loss.

        Args:
            verdicts (`(n,)` or `()` bool): On the training device.
            raise_for (`Callable`): Gets them, as a list or one bool, and raises for False.
        """
        if self.defers:
            self._due.append((begin({0: verdicts}), raise_for))
        else:
            check_at_once(verdicts, raise_for)

    def check_due(self) -> None:
        """Look at what was deferred."""
        due, self._due = self._due, []
        for verdicts, raise_for in due:
            raise_for(verdicts.wait()[0].tolist())

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
