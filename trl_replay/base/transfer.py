"""Copies from the device, which wait for it once, one copy to it, and what tells that weights have changed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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


def fetch(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
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


SAMPLED = 8
"""Values of each parameter that count, spread over it: thousands in all. A change that leaves all of them alone, as of
a few values of one matrix, hardly moves a log-prob."""


def fingerprint(parameters: Iterable[Any]) -> str:
    """A hash of a sample of this process's values, whoever changed them; empty if there are no parameters.

    Neither identities nor torch's counts of changes would do: `parameter.data` goes around these, and engines that
    shard parameters give them other memory at every forward.
    """
    import torch

    samples: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        values = _local(parameter).detach().reshape(-1)
        samples[values.device, values.dtype].append(values[:: max(len(values) // SAMPLED, 1)])
    if not samples:
        return ""
    found = fetch({kind: torch.cat(values) for kind, values in samples.items()})
    hashed = hashlib.blake2b(digest_size=16)
    for values in found.values():
        hashed.update(values.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def changes_in_place(parameters: Iterable[Any]) -> int:
    """How often torch has seen parameters being changed in place, of those that no engine shards: it sees one row of a
    matrix, which a sample may leave out."""
    import torch

    return sum(one._version for one in parameters if type(one) is torch.nn.Parameter and not hasattr(one, "ds_id"))


def _local(parameter: Any) -> Any:
    """What this process has of a parameter: of one that FSDP 2 or DeepSpeed's ZeRO 3 shards, its part."""
    sharded = getattr(parameter, "ds_tensor", None)
    if sharded is not None:
        return sharded
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
