"""A generation batch, or a further round of it, once its groups are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..data.types import Batch, Bools, Floats, Groups, Ints
from ..distributed.row_layout import RowLayout


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

    @classmethod
    def unseen(cls, batch: Batch, rows: RowLayout) -> Generated:
        """Return a batch whose groups are unavailable after an error, which all processes raise at their next
        message."""
        none = np.empty((0, rows.size))
        flat = np.empty(0, np.int64)
        whole = none.astype(np.int64)
        groups = Groups(none[:, :, None], np.ones(1), none, whole, whole, flat.astype(bool), flat, flat)
        return cls(batch, rows, groups, torch.empty(0, 1), ())

    @property
    def groups(self) -> Ints:
        """Numbers of the groups that the scope shares, among all processes' groups."""
        size = self.rows.size
        first_rows = self.rows.columns["row"][::size]
        return np.asarray(first_rows // size)

    @property
    def dead_here(self) -> Bools:
        """Mask of the dead groups among those with rows on this process."""
        return self.fresh.dead[self.rows.slots_here]

    @property
    def items_here(self) -> Floats:
        """What each group's rows on this process add to `num_items_in_batch`."""
        here = self.rows.here
        groups = np.arange(here.start, here.stop) // self.rows.size
        items = self.rows.columns["items"][here]
        return np.asarray(np.bincount(groups - groups[0], items), np.float64)
