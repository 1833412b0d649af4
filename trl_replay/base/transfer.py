"""Copies from the device, which wait for it once, and one copy to it."""

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
