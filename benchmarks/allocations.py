"""Memory that the seam allocates: bytes of new tensors, how many of them live at a time, and who asked."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl import GRPOTrainer

import trl_replay
from trl_replay import compat
from trl_replay.trainer.callback import ReplayCallback

PACKAGE = Path(trl_replay.__file__).parent
CALLBACKS = ("on_optimizer_step", "on_step_end", "on_train_end")


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations make while the seam is open, and none of the trainer's own methods runs.

    `with` it, train. What an operation needs only while it runs, and memory that is no tensor's, does not count.

    Attributes:
        open (`bool`): Whether what runs is the seam's.
        allocated (`int`): Bytes of all new tensors since `begin`.
        most (`int`): Most bytes that the seam's tensors had at a time since `begin`, above those that they had then.
        lines (`Counter`): Bytes of new tensors since `begin`, by the line of trl_replay that asked for them.
        at_most (`Counter`): Bytes that lived when it was `most`, by line; those from before `begin` are among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self._live: Counter[str] = Counter()
        self._total = 0
        self.begin()

    def begin(self) -> None:
        """Counts from 0 again."""
        self.allocated = 0
        self.most = 0
        self.lines: Counter[str] = Counter()
        self.at_most: Counter[str] = Counter()
        self._before = self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.open:
            given = {_memory(tensor) for tensor in _tensors([args, kwargs])}
            for tensor in _tensors(result):
                if _memory(tensor) not in given:
                    given.add(_memory(tensor))
                    self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        count, line = storage.nbytes(), _asker()
        self.allocated += count
        self.lines[line] += count
        self._live[line] += count
        self._total += count
        if self._total - self._before > self.most:
            self.most = self._total - self._before
            self.at_most = +self._live
        weakref.finalize(storage, self._free, line, count).atexit = False

    def _free(self, line: str, count: int) -> None:
        self._live[line] -= count
        self._total -= count

    def around(self, function: Callable[..., Any], seam: bool) -> Callable[..., Any]:
        """`function`, of which all that it does itself is the seam's, or not the seam's."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.open = self.open, seam
            try:
                return function(*args, **kwargs)
            finally:
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


def _asker() -> str:
    """The line of the package that is being run: `loss/tap.py:100 Tap._record`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
