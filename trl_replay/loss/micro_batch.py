"""The micro-batch that the loss is given while the log-prob tap is open, and what the tap knows of replayed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.compose import loss_mask
from ..compat import OLD_LOGPS, REF_LOGPS

ROWS = "trl_replay_rows"
"""Batch key of the row ids, `(B, 2)` int64 on the CPU. First column: 1 + candidate row, -1 - replayed row, or 0.
Second: the flags `COMPOSED` (the batch's padding is ours, not the model's), `SILENT` (the row trains nothing),
`EXCLUDED` (it is out of the loss's denominator) and `WITHOUT_KL`."""
COMPOSED, SILENT, EXCLUDED, WITHOUT_KL = 1, 2, 4, 8


class MicroBatch(dict[str, Any]):
    """A shallow copy of the loss's inputs that notes whether the old log-probs were read while it was watched.

    Attributes:
        entropies (`(b, C)`, *optional*): The policy's, detached, while the loss is still to choose among them.
        high_entropy (`(b, C)` bool, *optional*): What it chose by `top_entropy_quantile`.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.rows: torch.Tensor = self.pop(ROWS)
        self.tapped = False
        self.watched = False
        self.read = False
        self.entropies: torch.Tensor | None = None
        self.high_entropy: torch.Tensor | None = None

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
        return super().get(key, default)

    def peek(self, key: str) -> Any:
        """The value of a key, or None: not the loss's own reading."""
        return super().get(key)

    def keep(self, key: str, kept: torch.Tensor, logps: torch.Tensor) -> None:
        """Keep log-probs where `kept`, `(b, C)` bool, and put `logps` elsewhere; nothing if it has no such key."""
        value = self.peek(key)
        if value is not None:
            self[key] = torch.where(kept, value, logps.to(value.dtype))

    def silence(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Take rows, `(b,)` bool, out of the policy and the KL term, in value and gradient; `logps` are the
        policy's, `(b, C)`."""
        tokens = rows.unsqueeze(1)
        advantages = self["advantages"]
        self["advantages"] = advantages.masked_fill(rows if advantages.dim() == 1 else tokens, 0.0)
        kept = loss_mask(self).bool() & ~tokens
        self.keep(OLD_LOGPS, kept, logps)
        self.keep(REF_LOGPS, kept, logps)

    def _note(self, key: str) -> None:
        if key == OLD_LOGPS and self.watched:
            self.read = True


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
