"""A generation batch of which everything is known that decisions need."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..batch.candidates import Block
from ..batch.group_view import AdvantageRule
from ..data.types import Batch, Groups
from ..distributed.row_layout import RowLayout


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """A generation batch, of which no group will be generated again.

    Attributes:
        batch (`dict`): This process's rows as TRL returned them, texts on the CPU, with the advantages that a plugin
            gave them.
        given (`dict`): As TRL returned them, on its device.
        fetched (`dict`): The copies of these on the CPU, which `batch` has where nothing was changed.
        rows ([`RowLayout`]): Where they lie.
        groups ([`Groups`]): The groups that the scope shares, with what a plugin made of their advantages.
        generations (`tuple[Groups, ...]`): The groups of all rounds of generation.
        refilled (`int`): How many of the groups are of further rounds.
        rule ([`AdvantageRule`]): How TRL made advantages of its rewards.
        keys (`frozenset[str]`): Batch keys that an entry must be able to restore.
        recorded ([`Block`], *optional*): Log-probs that are stored without being seen by the loss (`replay_record`).
        reference (`(B, C)`, *optional*): The reference model's, taken out of the batch where not all rows' KL terms
            count.
        logps_known (`bool`): Whether its log-probs are known before the loss sees its rows.
    """

    batch: Batch
    given: Batch
    fetched: Batch
    rows: RowLayout
    groups: Groups
    generations: tuple[Groups, ...]
    refilled: int
    rule: AdvantageRule
    keys: frozenset[str]
    recorded: Block | None
    reference: torch.Tensor | None
    logps_known: bool

    @property
    def surplus(self) -> int:
        """Number of groups of further rounds that took no slot."""
        return sum(len(groups) for groups in self.generations[1:]) - self.refilled

    def emptied(self) -> FreshBatch:
        """The batch with every slot to be filled."""
        dead = np.ones(len(self.groups), bool)
        return replace(self, groups=replace(self.groups, dead=dead))
