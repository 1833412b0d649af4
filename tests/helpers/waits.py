"""Counts how often replay waits for the device, on a machine that has none.

Tensors of the batch, of its rewards and of log-probs are marked as if they were on a device; what is computed of them
is marked, too. Whoever asks a marked tensor for a value that Python or the CPU needs would wait for the device.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

import trl_replay
from trl_replay.base import transfer

PACKAGE = str(Path(trl_replay.__file__).parent)
ASKS = frozenset(
    {
        "__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "equal", "item", "masked_select",
        "nonzero", "numpy", "repeat_interleave", "tolist", "unique",
    }
)  # fmt: skip
WAITS: Counter[str] = Counter()
"""Waits of replay's so far, by file and function."""


class Marked(torch.Tensor):
    """A tensor that is said to be on a device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        asker = sys._getframe(1).f_code
        fetches = asker.co_filename == transfer.__file__
        if fetches and func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if _waits(name, args, kwargs or {}) and not fetches:
            _note()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        came_to_the_cpu = name in ("cpu", "numpy") or (name == "to" and _goes_to_the_cpu(args, kwargs or {}))
        if came_to_the_cpu:
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return mark(result)


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        by_mask = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)
        filled = name == "__setitem__" and not isinstance(args[2], torch.Tensor)  # needs no count of places
        return by_mask and not filled
    return name in ASKS or (name == "to" and _goes_to_the_cpu(args, kwargs))


def _goes_to_the_cpu(args: Any, kwargs: Any) -> bool:
    targets = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    return any(torch.device(target).type == "cpu" for target in targets if target != "")


def _note() -> None:
    """Counts a wait if replay asked, and not the trainer or a helper of torch's."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "/torch/" in frame.filename:
            continue
        if frame.filename.startswith(PACKAGE):
            WAITS[f"{Path(frame.filename).relative_to(PACKAGE)}: {frame.name}"] += 1
        return


def mark(value: Any) -> Any:
    """The same tensors, marked, also in tuples, lists and dictionaries."""
    if type(value) is torch.Tensor:
        return value.as_subclass(Marked)
    if isinstance(value, dict):
        return {key: mark(part) for key, part in value.items()}
    if isinstance(value, tuple | list) and any(type(part) is torch.Tensor for part in value):
        parts = [mark(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class OnDevice(GRPOTrainer):
    """The stock trainer; what it makes of a batch is marked."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return mark(super()._generate_and_score_completions(inputs))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return mark(super()._calculate_rewards(*args, **kwargs))

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return mark(super()._get_per_token_logps_and_entropies(*args, **kwargs))
