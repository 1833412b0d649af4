"""From the device to the CPU, waiting for the device once, however many tensors come."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)


def fetch(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The tensors on the CPU: those that are there already as they are, copies of the others.

    Copies from a CUDA device are begun one after the other, into pinned memory, and waited for together; other devices
    are waited for at each.
    """
    copies = {}
    devices = set()
    for key, tensor in tensors.items():
        asynchronous = tensor.is_cuda
        copies[key] = tensor.detach().to("cpu", non_blocking=asynchronous)
        if asynchronous:
            devices.add(tensor.device)
    wait(devices)
    return copies


def wait(devices: set[torch.device]) -> None:
    """Returns when what these CUDA devices' present streams were asked to do is done."""
    if devices:
        import torch

        for device in devices:
            torch.cuda.current_stream(device).synchronize()
