"""Memory that the seam allocates: bytes of new tensors and arrays, and how many live at a time."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl import GRPOTrainer

from trl_replay import compat
from trl_replay.trainer.callback import ReplayCallback

CALLBACKS = ("on_optimizer_step", "on_step_end", "on_train_end")
OBJECTS = 4096
"""Bytes of Python's objects that come and go between two looks: no more than this is no array."""


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations make, and NumPy's arrays between them, while the seam is open, and none of
    the trainer's own methods runs.

    `with` it, train. What an operation of torch needs only while it runs does not count.

    Attributes:
        open (`bool`): Whether what runs is the seam's.
        allocated (`int`): Bytes of all new tensors and arrays since `begin`; of arrays that came one after the other
            between two tensors, of the most that there were.
        most (`int`): Most bytes that the seam had at a time since `begin`, above those that it had then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self._total = 0
        self._base = 0  # what Python and NumPy had at the last look
        self.begin()

    def begin(self) -> None:
        """Counts from 0 again."""
        self.allocated = 0
        self.most = 0
        self._before = self._total
        self._arrays = 0

    def __enter__(self) -> Any:
        tracemalloc.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        tracemalloc.stop()

    def _look(self) -> None:
        """Notes what arrays have taken since the last look, where that was the seam."""
        now, peak = tracemalloc.get_traced_memory()
        grown = peak - self._base
        if self.open and grown > OBJECTS:
            self.allocated += grown
            self._note_most(self._arrays + grown)
        if self.open and abs(now - self._base) > OBJECTS:
            self._arrays += now - self._base
        self._look_away()

    def _look_away(self) -> None:
        """What Python has taken until now does not count."""
        tracemalloc.reset_peak()
        self._base, _ = tracemalloc.get_traced_memory()

    def _note_most(self, arrays: int) -> None:
        self.most = max(self.most, self._total - self._before + arrays)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.open:
            self._look()
            given = {_memory(tensor) for tensor in _tensors([args, kwargs])}
            for tensor in _tensors(result):
                if _memory(tensor) not in given:
                    given.add(_memory(tensor))
                    self._note(tensor.untyped_storage())
            self._look_away()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        count = storage.nbytes()
        self.allocated += count
        self._total += count
        self._note_most(self._arrays)
        weakref.finalize(storage, self._free, count).atexit = False

    def _free(self, count: int) -> None:
        self._total -= count

    def around(self, function: Callable[..., Any], seam: bool) -> Callable[..., Any]:
        """`function`, of which all that it does itself is the seam's, or not the seam's."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._look()
            before, self.open = self.open, seam
            try:
                return function(*args, **kwargs)
            finally:
                self._look()
                self.open = before

        return run

    def trainer_class(self, base: type = GRPOTrainer, **methods: Callable[..., Any]) -> type:
        """A subclass whose methods do what those of `base` do, and close the seam meanwhile; `methods` are more."""
        stock = {name: self.around(getattr(base, name), seam=False) for name in compat.SEAM}
        return type("WatchedTrainer", (base,), {**stock, **methods})

    def watch(self, trainer: Any) -> None:
        """Counts what the seam on this trainer of the `trainer_class` allocates."""
        for name in compat.SEAM:
            seam = trainer.__dict__[name]
            seam._around = self.around(seam._around, seam=True)
        callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ReplayCallback))
        for name in CALLBACKS:
            setattr(callback, name, self.around(getattr(callback, name), seam=True))


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """Bytes of a batch's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(dict(batch)))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
