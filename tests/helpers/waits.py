"""Counts what a step does to a device, on a machine that has none: waits for it, copies to it, and torch calls on it.

Tensors of the batch, of its rewards and of log-probs are marked as if they were on a GPU; what is computed of them is
marked, too. Whoever asks a marked tensor for a value that Python or the CPU needs waits for the device, and so does a
copy to it from memory that is not pinned. What is counted is told apart by who asked: replay's code or the trainer's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from trl import GRPOTrainer

import trl_replay
from trl_replay.base import progress

PACKAGE = str(Path(trl_replay.__file__).parent)
WAIT, UP, PINNED, CALL = "waits", "blocking copies to the device", "pinned copies to the device", "calls on the device"
LOSS = "waits in the loss"
BEFORE = "copies that were begun an update before"
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ASKS = frozenset(
    {
        "__array__", "__bool__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal", "item",
        "masked_select", "nonzero", "numpy", "tolist", "unique",
    }
)  # fmt: skip
OURS: Counter[tuple[str, str]] = Counter()
"""Of replay, by what was done and by file and function."""
THEIRS: Counter[str] = Counter()
"""Of the trainer, by what was done."""


class Marked(torch.Tensor):
    """A tensor that is said to be on a device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _called(func, args, kwargs or {})


class Watched(TorchFunctionMode):
    """While it is entered, calls without a marked tensor are seen as well: those that bring one to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _called(func, args, kwargs or {})


def _called(func, args, kwargs):
    name = getattr(func, "__name__", "")
    given = list(_flat([*args, *kwargs.values()]))
    marked = any(isinstance(value, Marked) for value in given)
    asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    if marked and asked in ("device", "is_cuda"):
        return CUDA if asked == "device" else True
    there = bool(args) and isinstance(args[0], Marked)
    wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device | Marked)]
    devices = [value.device if isinstance(value, Marked) else value for value in wanted]
    leaves = name == "cpu" or (name == "to" and any(str(device) == "cpu" for device in devices))
    comes = any(str(device).startswith("cuda") for device in devices) and name in ("to", "tensor", "as_tensor")
    moved = bool(kwargs.get("non_blocking"))
    if comes and not there:
        _note(PINNED if moved else UP)
    elif marked and name in ("__getitem__", "__setitem__"):
        _index(name, args, there)
    elif marked and (name in ASKS or leaves) and not (leaves and moved):
        _note(WAIT)
    elif name == "new_tensor" and there:
        _note(UP)
    elif name == "repeat_interleave" and isinstance(args[1], Marked) and kwargs.get("output_size") is None:
        _note(WAIT)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in kwargs.items()})
    on_device = (marked or comes) and not leaves and not (name == "__getitem__" and not there)
    if on_device and not asked and not comes and _computes(result, args, name):
        _note(CALL)
    if leaves and isinstance(result, torch.Tensor):
        return result.as_subclass(torch.Tensor)
    return mark(result) if on_device else result


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _on_cpu(value):
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )
    return CPU if is_cuda else value


def _index(name: str, args: Any, there: bool) -> None:
    """An index by a mask needs the number of its places; one that is on the other side has to come."""
    value = args[2] if name == "__setitem__" else None
    for part in args[1] if isinstance(args[1], tuple) else (args[1],):
        if isinstance(part, torch.Tensor) and part.dtype == torch.bool:
            if name == "__getitem__" or isinstance(value, torch.Tensor):
                _note(WAIT)
        elif isinstance(part, list | torch.Tensor) and isinstance(part, Marked) != there:
            _note(UP if there else WAIT)
    if there and isinstance(value, torch.Tensor) and not isinstance(value, Marked) and value.numel() > 1:
        _note(UP)


def _computes(result: Any, args: Any, name: str) -> bool:
    """Whether a call launches something: its result is a tensor with memory of its own, or it wrote into one."""
    first = next((value for value in args if isinstance(value, torch.Tensor)), None)
    parts = [part for part in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(part)]
    with torch._C.DisableTorchFunctionSubclass():
        own = {part.untyped_storage().data_ptr() for part in parts}
        return bool(parts) and (
            first is None or first.untyped_storage().data_ptr() not in own or (name[-1:] == "_" and name[:1] != "_")
        )


def _note(what: str) -> None:
    """Count it for who asked: the innermost frame that is not torch's, nor this file's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            break
        frame = frame.f_back
    kinds = (what, LOSS) if what == WAIT and _in_loss(frame) else (what,)
    for kind in kinds:
        if frame is None or not file.startswith(PACKAGE):
            THEIRS[kind] += 1
        else:
            OURS[kind, f"{Path(file).relative_to(PACKAGE)}: {frame.f_code.co_name}"] += 1


def _in_loss(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code is OnDevice.compute_loss.__code__:
            return True
        frame = frame.f_back
    return False


def ours(what: str) -> int:
    """How much of something replay's code has done."""
    return sum(count for (kind, _), count in OURS.items() if kind == what)


def mark(value):
    """The same tensors, marked, also in tuples, lists and dictionaries."""
    if type(value) is torch.Tensor:
        return value.as_subclass(Marked)
    if isinstance(value, dict):
        return {key: mark(part) for key, part in value.items()}
    if isinstance(value, tuple | list) and any(type(part) is torch.Tensor for part in value):
        parts = [mark(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Device:
    """In the place of what `transfer` asks CUDA for. Its device does what it is asked to within an update.

    Attributes:
        update (`int`): The update at hand.
    """

    def __init__(self):
        self.update = 0

    def mark(self, device):
        """An event at the end of what it was asked to do so far."""
        begun = self.update
        return SimpleNamespace(synchronize=lambda: _note(WAIT if begun == self.update else BEFORE))

    @staticmethod
    def pinned(count: int) -> torch.Tensor:
        """Bytes of memory that is said to be pinned."""
        return torch.empty(count, dtype=torch.uint8)

    def install(self, patch):
        """Put it there; `patch(owner, name, value)` does so."""
        patch(progress, "mark", self.mark)
        patch(progress, "pinned", self.pinned)


class OnDevice(GRPOTrainer):
    """The stock trainer; what it makes of a batch is marked."""

    def train(self, *args, **kwargs):
        with Watched():
            return super().train(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        return mark(super()._generate_and_score_completions(inputs))

    def _calculate_rewards(self, *args, **kwargs):
        return mark(super()._calculate_rewards(*args, **kwargs))

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return mark(super()._get_per_token_logps_and_entropies(*args, **kwargs))

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss.as_subclass(torch.Tensor)
