"""A generation batch: once its columns are shared, and once its groups are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..distributed.row_layout import RowLayout
from ..types import Batch, Bools, Floats, Groups, Ints


@dataclass(frozen=True, slots=True)
class Shared:
    """A batch that stock scored, once its columns are shared.

    Attributes:
        batch (`dict`): This process's rows.
        rows ([`RowLayout`]): Where they lie.
        look (`Callable`): Gives what is known of their groups. It may fail on one process alone, so that it is called
            where the others are told.
        recorded (`(B, C)`, *optional*): Log-probs that are stored without being seen by the loss (`replay_record`).
        reference (`(B, C)`, *optional*): The reference model's, where not all rows' KL terms count.
    """

    batch: Batch
    rows: RowLayout
    look: Callable[[], Generated]
    recorded: torch.Tensor | None = None
    reference: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """A generation batch, or a further round of it, with its groups.

    Attributes:
        batch (`dict`): This process's rows, as TRL returned them.
        rows ([`RowLayout`]): Where they lie, with the columns that the scope shares.
        fresh ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        scored (`(rows of all processes, functions)`): Raw rewards, NaN where None.
        generations (`tuple[Groups, ...]`): The groups of every generation that the batch took, those included that
            were generated again for, or are left over.
        refilled (`int`): How many of its groups are of further rounds.
    """

    batch: Batch
    rows: RowLayout
    fresh: Groups
    scored: torch.Tensor
    generations: tuple[Groups, ...]
    refilled: int = 0

    @property
    def surplus(self) -> int:
        """Number of groups of further rounds that took no slot."""
        further = sum(len(groups) for groups in self.generations[1:])
        return further - self.refilled

    @property
    def groups(self) -> Ints:
        """Numbers of the groups that the scope shares, among those of all processes."""
        size = self.rows.size
        first_rows = self.rows.columns["row"][::size]
        return np.asarray(first_rows // size)

    @property
    def dead_here(self) -> Bools:
        """Mask of the dead groups among those with rows on this process."""
        return self.fresh.dead[self.rows.slots_here]

    @property
    def items_here(self) -> Floats:
        """Per group, what its rows on this process add to `num_items_in_batch`."""
        here = self.rows.here
        groups = np.arange(here.start, here.stop) // self.rows.size
        items = self.rows.columns["items"][here]
        return np.asarray(np.bincount(groups - groups[0], items), np.float64)
