"""The micro-batch that the loss is given while the log-prob tap is open, and what the tap knows of replayed rows."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.compose import loss_mask
from ..compat import OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS
from ..data.fields import ADVANTAGES
from .handed import Handed, Uses, plain

ROWS = "trl_replay_rows"
"""Batch key of the row ids, `(B, 2)` int64 on the CPU. First column: 1 + candidate row, -1 - replayed row, or 0.
Second: the flags `COMPOSED` (the batch's padding is ours, not the model's), `SILENT` (the row trains nothing),
`EXCLUDED` (it is out of the loss's denominator) and `WITHOUT_KL`."""
COMPOSED, SILENT, EXCLUDED, WITHOUT_KL = 1, 2, 4, 8


WRITTEN = (ADVANTAGES, OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS)
"""Keys that the tap writes, once the policy's log-probs are known."""


class MicroBatch(dict[str, Any]):
    """A shallow copy of the loss's inputs that knows what the loss has used of it, also where it copies it further.

    Args:
        inputs (`Mapping`): The trainer's.
        hands_out (`bool`): Whether the loss gets [`Handed`] tensors, which show in every copy what the tap writes.
            Without, the loss reads the old log-probs from here.

    Attributes:
        uses ([`Uses`]): Keys that the loss has used since the tap has written.
        entropies (`(b, C)`, *optional*): The policy's, detached, while the loss is still to choose among them.
        high_entropy (`(b, C)` bool, *optional*): What it chose by `top_entropy_quantile`.
    """

    def __init__(self, inputs: Mapping[str, Any], hands_out: bool = True) -> None:
        super().__init__(inputs)
        self.rows: torch.Tensor = self.pop(ROWS)
        self.uses = Uses()
        self.tapped = False
        self.entropies: torch.Tensor | None = None
        self.high_entropy: torch.Tensor | None = None
        self._hands_out = hands_out
        self._handed: dict[str, Handed] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._unwritten: set[str] = set()
        if hands_out:
            self._hand_out(inputs)

    @property
    def ids(self) -> torch.Tensor:
        """`(b,)` int64 on the CPU: the first column of `ROWS`."""
        return self.rows[:, 0]

    @property
    def flags(self) -> torch.Tensor:
        """`(b,)` int64 on the CPU: the second column of `ROWS`."""
        return self.rows[:, 1]

    @property
    def replayed(self) -> torch.Tensor:
        """`(b,)` bool on the CPU: whether a row is a replayed one."""
        return self.ids < 0

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        self._note(key)
        return super().get(key, default) if key in self else default

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) and key not in self._unwritten

    def __setitem__(self, key: str, value: Any) -> None:
        self._unwritten.discard(key)
        to_hand = self._hands_out and key in WRITTEN and torch.is_tensor(value)
        super().__setitem__(key, self._hand(value, key) if to_hand else value)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)

    def peek(self, key: str) -> Any:
        """The value of a key, or None: no use by the loss."""
        if key not in self:
            return None
        return self._values[key] if key in self._values else super().get(key)

    def write(self, key: str, value: torch.Tensor) -> None:
        """Give a key another value, in every copy."""
        handed = self._handed.get(key)
        self[key] = value
        if handed is not None:
            handed.show(value)
            self._handed[key] = handed

    def keep(self, key: str, kept: torch.Tensor, logps: torch.Tensor) -> None:
        """Keep log-probs where `kept`, `(b, C)` bool, and put `logps` elsewhere; nothing if it has no such key."""
        value = self.peek(key)
        if value is not None:
            self.write(key, torch.where(kept, value, logps.to(value.dtype)))

    def complete(self, logps: torch.Tensor) -> None:
        """All is written: log-probs that nothing has written are the policy's, `(b, C)`. What is used from now on is
        noted."""
        if self._hands_out:
            if OLD_LOGPS not in self:
                self.write(OLD_LOGPS, logps)
            if SAMPLING_LOGPS not in self:  # in copies alone, where a loss would take the old ones
                self._handed[SAMPLING_LOGPS].show(self.peek(OLD_LOGPS))
        self.uses.watched = True

    def silence(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Take rows, `(b,)` bool, out of the policy and the KL term, in value and gradient; `logps` are the
        policy's, `(b, C)`."""
        tokens = rows.unsqueeze(1)
        advantages = self.peek(ADVANTAGES)
        self.write(ADVANTAGES, advantages.masked_fill(rows if advantages.dim() == 1 else tokens, 0.0))
        kept = loss_mask(self).bool() & ~tokens
        self.keep(OLD_LOGPS, kept, logps)
        self.keep(REF_LOGPS, kept, logps)

    def _hand_out(self, inputs: Mapping[str, Any]) -> None:
        self._unwritten = {key for key in (OLD_LOGPS, SAMPLING_LOGPS) if inputs.get(key) is None}
        ids: torch.Tensor = inputs["completion_ids"]
        nothing = torch.full((1, 1), torch.nan, device=ids.device).expand(ids.shape)
        for key in WRITTEN:
            value = nothing if key in self._unwritten else inputs.get(key)
            if value is not None:
                super().__setitem__(key, self._hand(value, key))

    def _hand(self, value: torch.Tensor, key: str) -> Handed:
        self._values[key] = value = plain(value)
        self._handed[key] = handed = Handed.of(value, key, self.uses)
        return handed

    def _note(self, key: str) -> None:
        if self.uses.watched and not self._hands_out:
            self.uses.keys.add(key)


@dataclass(slots=True)
class PlacedRow:
    """A replayed row of the current generation batch.

    Attributes:
        logps (`(length,)`): Its behavior log-probs.
        age (`int`): Updates since it was generated.
        advantage (`()` or `(length,)`): In the composed batch: the row's, or each token's.
        priority (`float`): Its group's chance of being drawn, relative to the least likely one's.
        proximal (`(C,)`, *optional*): Log-probs of its first training forward since it was drawn.
    """

    logps: torch.Tensor
    age: int
    advantage: torch.Tensor
    priority: float
    proximal: torch.Tensor | None = None

    def keep_proximal(self, logps: torch.Tensor) -> torch.Tensor:
        """The log-probs of its first training forward since it was drawn, which are `logps` if this is it."""
        if self.proximal is None:
            self.proximal = logps
        return self.proximal
