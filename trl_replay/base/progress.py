"""What a session draws from, the updates done, and what failed here that the others have not heard of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .transfer import Copies, begin

if TYPE_CHECKING:
    import torch


class Generators:
    """Two private generators.

    Attributes:
        shared (`numpy.random.Generator`): In the same state on all processes that share the buffer.
        local (`numpy.random.Generator`): This process's own, drawn from as often as its rows need.
    """

    def __init__(self, seed: int = 0) -> None:
        self.shared = np.random.default_rng(seed)
        self.local = self.shared.spawn(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"shared": self.shared.bit_generator.state, "local": self.local.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any], shared: bool = True, local: bool = True) -> None:
        """Take what `state_dict` gave of those that are named."""
        if shared:
            self.shared.bit_generator.state = state["shared"]
        if local:
            self.local.bit_generator.state = state["local"]


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the global random generators after others' code has run."""
    import torch

    of_numpy = np.random.get_state()
    of_python = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


RaiseFor: TypeAlias = Callable[[Any], None]
CheckLater: TypeAlias = "Callable[[torch.Tensor, RaiseFor], None]"


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
