"""What a session draws from, the updates done, what failed here that the others have not heard of, and copies from and
to the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch


Key = TypeVar("Key", bound=Hashable)


class Copies(Generic[Key]):
    """Tensors on their way to the CPU.

    Args:
        tensors (`Mapping`): On the CPU; those that are copies must not be read before `wait`.
        marks (`Sequence[torch.cuda.Event]`): What has happened when all copies are there.
    """

    def __init__(self, tensors: Mapping[Key, torch.Tensor], marks: Sequence[torch.cuda.Event]) -> None:
        self._tensors = dict(tensors)
        self._marks = marks

    def wait(self) -> dict[Key, torch.Tensor]:
        """The tensors, once they are there."""
        for mark in self._marks:
            mark.synchronize()
        self._marks = ()
        return self._tensors


def begin(tensors: Mapping[Key, torch.Tensor]) -> Copies[Key]:
    """Begin to copy tensors to the CPU; those that are there already stay as they are.

    Copies from a CUDA device go into pinned memory, behind what the device's present stream was asked to do, and
    nobody waits for them here; other devices are waited for at each. What is copied must not be changed before `wait`.
    """
    copies = {}
    devices = set()
    for key, tensor in tensors.items():
        asynchronous = tensor.is_cuda
        copies[key] = tensor.detach().to("cpu", non_blocking=asynchronous)
        if asynchronous:
            devices.add(tensor.device)
    return Copies(copies, [mark(device) for device in devices])


def to_cpu(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The tensors on the CPU: those that are there already as they are, copies of the others."""
    return begin(tensors).wait()


def send(tensors: Mapping[Key, torch.Tensor], device: torch.device) -> dict[Key, torch.Tensor]:
    """The tensors, which are on the CPU, on a device: on CUDA in one copy from pinned memory, for which nobody waits.
    A copy from other memory waits for all that the device was asked to do so far."""
    if device.type != "cuda" or not tensors:
        return {key: tensor.to(device) for key, tensor in tensors.items()}
    import torch

    raw = {key: tensor.contiguous().view(-1).view(torch.uint8) for key, tensor in tensors.items()}
    sizes = [-(-len(values) // 8) * 8 for values in raw.values()]
    packed = pinned(sum(sizes))
    for room, values in zip(torch.split(packed, sizes), raw.values(), strict=True):
        room[: len(values)] = values
    sent = torch.split(packed.to(device, non_blocking=True), sizes)
    return {
        key: room[: len(raw[key])].view(tensor.dtype).view(tensor.shape)
        for room, (key, tensor) in zip(sent, tensors.items(), strict=True)
    }


def pinned(count: int) -> torch.Tensor:
    """Return bytes of pinned memory."""
    import torch

    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def mark(device: torch.device) -> torch.cuda.Event:
    """Return an event at the end of what a CUDA device's current stream was asked to do so far."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
    event.record(torch.cuda.current_stream(device))
    return event


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
