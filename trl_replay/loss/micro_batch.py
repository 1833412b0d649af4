"""A micro-batch inside the loss: the mapping that the loss reads, and what the tap knows of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..base.transfer import send
from ..batch.compose import loss_mask
from ..compat import LOSS, OLD_LOGPS, REF_LOGPS
from ..data.fields import ADVANTAGES
from ..errors import SeamError

ROWS = "trl_replay_rows"
"""Batch key of the row ids, `(B, 2)` int64 on the CPU. First column: 1 + candidate row, -1 - replayed row, or 0.
Second: the flags `COMPOSED` (the batch's padding is ours, not the model's), `SILENT` (the row trains nothing),
`EXCLUDED` (it is out of the loss's denominator) and `WITHOUT_KL`."""
COMPOSED, SILENT, EXCLUDED, WITHOUT_KL = 1, 2, 4, 8


class ReadNotes(dict[str, Any]):
    """A copy of a batch that notes in `read` which keys are read, or asked for by `in`."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        self.read.add(key)
        return super().get(key, default)


class MicroBatch:
    """One call of the loss that calls no other: the mapping that it reads, and what the tap knows of its rows.

    Args:
        inputs (`Mapping`): What the loss was given.
        rows (`(b, 2)` int64, on the CPU): See `ROWS`.
        sent (`(b, 2)`, *optional*): The same on the training device.

    Attributes:
        batch (`Mapping`): What it reads: the same, or a shallow copy, which alone may be written to.
        ids, flags (`list[int]`): The columns of `ROWS`.
        replayed (`list[int]`): Places of the replayed rows.
        tapped (`bool`): Whether the log-probs came, and all was written.
        entropies (`(b, C)`, *optional*): The policy's, detached, while the loss is still to choose among them.
        high_entropy (`(b, C)` bool, *optional*): What it chose by `top_entropy_quantile`.
        probe (`()`, *optional*): A factor of 1 on advantages that the loss had read before: has it a gradient, the
            loss uses the present ones.
    """

    def __init__(self, inputs: Any, rows: torch.Tensor, sent: torch.Tensor | None = None) -> None:
        self.inputs = self.batch = inputs
        self.rows = rows
        self._sent = sent
        pairs: list[list[int]] = rows.tolist()
        self.ids = [row for row, _ in pairs]
        self.flags = [flags for _, flags in pairs]
        self._some = 0
        for flags in self.flags:
            self._some |= flags
        self.replayed = [place for place, row in enumerate(self.ids) if row < 0]
        self.asked = False
        self.tapped = False
        self.entropies: torch.Tensor | None = None
        self.high_entropy: torch.Tensor | None = None
        self.probe: torch.Tensor | None = None
        self._before: dict[str, Any] = {}  # of keys that were written: what the loss was given, and the value of ours
        self._ours: dict[str, tuple[torch.Tensor, int]] = {}

    def has(self, flag: int) -> bool:
        """Tell whether a row has a flag."""
        return bool(self._some & flag)

    def marked(self, flag: int) -> torch.Tensor:
        """`(b,)` bool on the training device: the rows that have a flag."""
        return (self._on_device[:, 1] & flag).ne(0)

    @property
    def are_replayed(self) -> torch.Tensor:
        """`(b,)` bool on the training device: the replayed rows."""
        return self._on_device[:, 0] < 0

    @property
    def _on_device(self) -> torch.Tensor:
        if self._sent is None:
            self._sent = send({0: self.rows}, self.mask.device)[0]
        return self._sent

    @property
    def mask(self) -> torch.Tensor:
        """`(b, C)`: the tokens that the loss trains on."""
        return loss_mask(self.batch)

    def peek(self, key: str) -> Any:
        """The value of a key, or None."""
        return self.batch.get(key)

    def write(self, key: str, value: torch.Tensor) -> None:
        """Give a key another value in the copy."""
        self._before.setdefault(key, self.peek(key))
        self._ours[key] = value, value._version
        self.batch[key] = value

    def keep(self, key: str, kept: torch.Tensor, logps: torch.Tensor) -> None:
        """Keep log-probs where `kept`, `(b, C)` bool, and put `logps` elsewhere; nothing if it has no such key."""
        value = self.peek(key)
        if value is not None:
            self.write(key, torch.where(kept, value, logps.to(value.dtype)))

    def silence(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Take rows, `(b,)` bool, out of the policy and the KL term, in value and gradient; `logps` are the
        policy's, `(b, C)`."""
        tokens = rows.unsqueeze(1)
        advantages = self.peek(ADVANTAGES)
        self.write(ADVANTAGES, advantages.masked_fill(rows if advantages.dim() == 1 else tokens, 0.0))
        kept = self.mask.bool() & ~tokens
        self.keep(OLD_LOGPS, kept, logps)
        self.keep(REF_LOGPS, kept, logps)

    def give_back(self) -> None:
        """Put into the trainer's batch what the loss has put into the copy, as it would have without replay.

        Raises:
            SeamError: It has changed a value of ours, which must not stay there.
        """
        if self.batch is self.inputs:
            return
        for key, (value, version) in self._ours.items():
            if self.peek(key) is not value or value._version != version:
                raise SeamError(
                    f"{LOSS} changed {key!r} of its batch after it had asked for the log-probs, where replay gives "
                    "replayed rows other values. Change it before, or a copy of it, or train without replay: "
                    "use_replay=False."
                )
        left, known = {**self.batch, **self._before}, {*self.inputs}
        self.inputs.update({key: value for key, value in left.items() if value is not None or key in known})


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a loss divides by, in one generation batch.

    Attributes:
        kind (`str`): `"items"` (the batch's token count, which is corrected there), `"tokens"` (of the micro-batch) or
            `"rows"`.
        factor (`float`): Rows of all processes over those that are not masked.
        of_bonus (`bool`): Whether the same divides the entropy bonus; else tokens of the micro-batch do.
    """

    kind: str = "items"
    factor: float = 1.0
    of_bonus: bool = False

    def scale(self, micro: MicroBatch) -> torch.Tensor | float | None:
        """Factor on a micro-batch's loss that takes excluded rows out of its denominator; None if there is none."""
        if self.kind == "rows" and self.factor != 1.0:
            return self.factor
        if self.kind == "tokens" and micro.has(EXCLUDED):
            return _without_excluded(micro)
        return None

    def returned(
        self,
        result: tuple[Any, ...],
        micro: MicroBatch,
        masked: torch.Tensor | None,
        scale: torch.Tensor | float | None,
    ) -> tuple[Any, ...]:
        """Return the log-prob method's result with the gradients that are left of its entropies and auxiliary loss.

        The entropy bonus is the mean over those tokens of the micro-batch that are in the policy term's denominator,
        and that `top_entropy_quantile` leaves, whatever the loss divides by; its logged value stays that over all
        tokens. An auxiliary loss stays as it was.

        Args:
            result (`tuple`): Log-probs `(b, C)`, entropies `(b, C)` and more.
            micro ([`MicroBatch`]): The micro-batch, to which TRL adds the tokens of the highest entropies later.
            masked (`(b, C)` or `(b, 1)` bool, *optional*): Tokens without an entropy gradient.
            scale (`torch.Tensor` or `float`, *optional*): What the loss will be multiplied by.
        """
        if masked is None and scale is None:
            return result
        logps, *others = result
        for number, value in enumerate(others):
            if not torch.is_tensor(value) or not value.requires_grad:
                continue
            if value.shape == logps.shape:
                kept = value.view_as(value) if masked is None else torch.where(masked, value.detach(), value)
                if scale is not None or (not self.of_bonus and micro.has(EXCLUDED)):

                    def mended(gradient: torch.Tensor) -> torch.Tensor:
                        factor = _without_excluded(micro, micro.high_entropy)
                        return gradient * (factor / (1.0 if scale is None else scale))

                    kept.register_hook(mended)  # type: ignore[no-untyped-call]  # torch does not type it
                others[number] = kept
            elif value.dim() == 0 and scale is not None:
                others[number] = value / scale
        return logps, *others


def _without_excluded(micro: MicroBatch, within: torch.Tensor | None = None) -> torch.Tensor:
    """Trained tokens of a micro-batch, or those `within` a `(b, C)` bool, over those of its rows that are not
    excluded; 1 where nothing is left."""
    mask = micro.mask if within is None else micro.mask * within
    kept = (mask * ~micro.marked(EXCLUDED).unsqueeze(1)).sum()
    return torch.where(kept > 0, mask.sum() / kept.clamp(min=1), 1.0)
