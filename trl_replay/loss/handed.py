"""Tensors of a micro-batch that the loss may copy before the tap writes them: every copy shows what was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Uses:
    """What became of one micro-batch's [`Handed`] tensors.

    Attributes:
        watched (`bool`): Whether the tap has written all that it writes.
        keys (`set[str]`): The keys of those that some operation has used since.
        deep_copies (`list[Handed]`): Copies with memory of their own.
    """

    watched: bool = False
    keys: set[str] = field(default_factory=set)
    deep_copies: list[Handed] = field(default_factory=list)


class Handed(torch.Tensor):
    """A tensor whose value may still be written, and which notes that it is used. The results of operations are plain
    tensors.

    Attributes:
        key (`str`): Its key in the micro-batch.
        uses ([`Uses`]): The micro-batch's.
        version (`int`, *optional*): Of a deep copy: torch's count of changes in place as it was made.
    """

    key: str
    uses: Uses
    version: int | None = None

    @classmethod
    def of(cls, value: torch.Tensor, key: str, uses: Uses) -> Handed:
        """The same value, with its gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            handed = value.as_subclass(cls)
        handed.key, handed.uses = key, uses
        return handed

    def show(self, value: torch.Tensor) -> None:
        """Give this and its deep copies the value of `value`; copies that were changed in place keep their own."""
        with torch._C.DisableTorchFunctionSubclass():
            for handed in (self, *self.uses.deep_copies):
                if handed.key == self.key and handed.is_followed:
                    handed.data = value.detach()

    @property
    def is_followed(self) -> bool:
        """Tell whether this is no deep copy that was changed in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.version is None or self.version == self._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note_uses([*args, *kwargs.values()])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handed:
        with torch._C.DisableTorchFunctionSubclass():
            copy = Handed.of(self.detach().clone(), self.key, self.uses)
            copy.version = copy._version
        self.uses.deep_copies.append(copy)
        return copy


def plain(value: torch.Tensor) -> torch.Tensor:
    """The value with its gradient, not as a [`Handed`] tensor; that is no use of it."""
    if not isinstance(value, Handed):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def note_uses(values: Iterable[Any]) -> None:
    """Note which [`Handed`] tensors are among the arguments of an operation."""
    for value in values:
        if isinstance(value, list | tuple):
            note_uses(value)
        elif isinstance(value, Handed) and value.uses.watched and value.is_followed:
            value.uses.keys.add(value.key)
