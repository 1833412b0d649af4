"""Copies from the device to the CPU that wait for the device once, however many tensors there are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

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

    def unpinned(self) -> dict[Key, torch.Tensor]:
        """Return the same to keep for long, in pageable memory: pinned memory comes in powers of two, and a new block
        of it takes a call of the driver, so that blocks should soon be free for the next copies."""
        return {key: tensor.clone() if tensor.is_pinned() else tensor for key, tensor in self.wait().items()}


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


def fetch(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The tensors on the CPU: those that are there already as they are, copies of the others."""
    return begin(tensors).wait()


def mark(device: torch.device) -> torch.cuda.Event:
    """Return an event at the end of what a CUDA device's current stream was asked to do so far."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
    event.record(torch.cuda.current_stream(device))
    return event
