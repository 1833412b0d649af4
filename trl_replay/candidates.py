"""Fresh live groups on their way into the buffer: noted at scoring, complete once their log-probs are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .compat import OLD_LOGPS
from .report import Tally
from .types import Group, Groups


@dataclass(slots=True)
class Candidate:
    """A fresh live group on its way into the buffer.

    Attributes:
        serial (`int`): Its serial number.
        group ([`Group`]): The payload; `old_per_token_logps` is added at `complete`, where stock did not supply it.
        view ([`Groups`]): The group as scorers see it, without log-probs yet.
        update (`int`): Updates done at generation.
        records (`list`): Per row, the recorded log-probs `(C,)` on the training device; None until its forward ran.
    """

    serial: int
    group: Group
    view: Groups
    update: int
    records: list[torch.Tensor | None] = field(default_factory=list)

    def complete(self) -> bool:
        """Fills in the recorded log-probs; False if any row's are missing."""
        if OLD_LOGPS in self.group.tensors:
            return True
        lengths = self.group.completion_lengths.tolist()
        rows = [row[:length] for row, length in zip(self.records, lengths, strict=True) if row is not None]
        if len(rows) < len(lengths):
            return False
        tensors = {**self.group.tensors, OLD_LOGPS: torch.cat(rows).float()}
        self.group = Group(
            tensors, self.group.keys | {OLD_LOGPS}, self.group.prompt_lengths, self.group.completion_lengths
        )
        self.records = []
        return True


def admissible(candidates: Sequence[Candidate], tally: Tally) -> tuple[list[Candidate], Groups | None]:
    """Completes the candidates and refuses those that can't be replayed correctly.

    Returns:
        `(usable, groups)`: the candidates that may be scored, and their view with summed log-probs; None if there are none.
    """
    complete = [candidate for candidate in candidates if candidate.complete()]
    tally.refuse(len(candidates) - len(complete), "a row's first forward was missing or came after an update")
    sums = [_trainable_sums(candidate) for candidate in complete]
    usable = [row for row, values in enumerate(sums) if bool(values.isfinite().all())]
    tally.refuse(len(complete) - len(usable), "a trainable token's log-prob is not finite")
    if not usable:
        return [], None
    groups = Groups.concatenate([complete[row].view for row in usable])
    logps = torch.stack([sums[row] for row in usable]).double().cpu().numpy()
    return [complete[row] for row in usable], groups.take(range(len(groups)), logps)


def _trainable_sums(candidate: Candidate) -> torch.Tensor:
    """`(G,)`: the summed behaviour log-probs of each row's trainable tokens; those of masked tokens do not matter."""
    tensors = candidate.group.tensors
    logps = tensors[OLD_LOGPS]
    mask = torch.ones_like(logps, dtype=torch.bool)
    for key in ("completion_mask", "tool_mask"):
        if key in tensors:
            mask &= tensors[key].bool()
    rows = torch.split(torch.where(mask, logps, 0.0), candidate.group.completion_lengths.tolist())
    return torch.stack([row.sum() for row in rows])
