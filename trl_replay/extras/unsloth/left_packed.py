"""Values of completion tokens in rows that are packed left, over the padding of their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import compat


class LeftPacked:
    """Where the tokens of a micro-batch lie once every row is moved left over its padding.

    Of the packed columns, `(b, C + M)`, those of a row's completion begin M less the row's padding from the left; M is
    the most padding of a row. Pad tokens within a completion are left out, and what follows them moves up.

    Args:
        prompts, completions (`(b, P)` and `(b, C)` int64): Token ids.
        pad (`int`): The pad token's id.

    Attributes:
        real (`(b, C)` bool): Which completion tokens are not the pad token.
        most (`int`): M.
    """

    def __init__(self, prompts: torch.Tensor, completions: torch.Tensor, pad: int) -> None:
        self.real = completions != pad
        padding = (prompts == pad).sum(dim=1, keepdim=True)
        self.most = int(padding.max())
        self._from_end = self.real.cumsum(dim=1) - 1 - completions.size(1) - padding

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """`(b, C)` from packed columns; 0 for pad tokens."""
        columns = (values.size(1) + self._from_end).clamp(min=0)
        return torch.where(self.real, values.gather(1, columns), 0)

    def pack(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """`(b, width)` packed columns from `(b, C)`; 0 elsewhere."""
        rows, places = self.real.nonzero(as_tuple=True)
        packed = values.new_zeros(len(values), width)
        packed[rows, width + self._from_end[rows, places]] = values[rows, places]
        return packed


def left_packed(trainer: Any, batch: Mapping[str, Any]) -> LeftPacked:
    """Return where Unsloth has the log-probs of this batch's completions."""
    return LeftPacked(batch["prompt_ids"], batch["completion_ids"], compat.tokenizer(trainer).pad_token_id)
