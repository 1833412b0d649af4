"""Dead groups that nothing fills: which they are, and which live groups of the same batch are copied there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from ..batch.compose import cut
from ..decision import Sampled
from ..distributed.row_layout import RowLayout
from ..fields import FieldTable
from ..types import Batch, Bools, Groups, Placement

Pair: TypeAlias = tuple[int, int]
"""A dead slot, and the live slot of the same batch that is copied there."""


def dead_slots(fresh: Groups, filled: Sequence[int]) -> list[int]:
    """The dead groups that replay did not fill."""
    dead = np.flatnonzero(fresh.dead).tolist()
    return [slot for slot in dead if slot not in set(filled)]


def all_wrong(fresh: Groups, pass_reward: float) -> Bools:
    """`(n,)`: the dead groups in which no row passes; not those whose rows all failed."""
    passes = fresh.reward >= pass_reward
    failed = fresh.failed.all(axis=1)
    return np.asarray(fresh.dead & ~passes.any(axis=1) & ~failed)


def copies(fresh: Groups, sampled: Sampled, rows: RowLayout, rng: np.random.Generator) -> list[Pair]:
    """Pairs (dead slot, live slot of the same process that is copied there): every live group once before any twice.

    A group whose rows lie on several processes is neither filled nor copied.
    """
    by_home: dict[int, list[int]] = {}
    for slot in range(len(fresh)):
        home = rows.home(slot)
        if home is not None and slot not in sampled.slots:
            by_home.setdefault(home, []).append(slot)
    pairs: list[Pair] = []
    for _, here in sorted(by_home.items()):
        live = [slot for slot in here if not fresh.dead[slot]]
        empty = [slot for slot in here if fresh.dead[slot]]
        if not (live and empty):
            continue
        rounds = -(-len(empty) // len(live))
        order = np.concatenate([rng.permutation(live) for _ in range(rounds)])
        pairs += zip(empty, order.tolist(), strict=False)
    return pairs


def copy_rows(values: torch.Tensor | None, rows: RowLayout, pairs: Sequence[Pair]) -> torch.Tensor | None:
    """Copy rows of `values`, `(B, …)`, as `place_copies` copies groups."""
    if values is None or not pairs:
        return values
    index = torch.arange(len(values), device=values.device)
    for one in rows.exchanges([dead for dead, _ in pairs], [live for _, live in pairs], rows):
        index[one.target] = index[one.source]
    return values[index]


def place_copies(batch: Batch, rows: RowLayout, pairs: Sequence[Pair], fields: FieldTable) -> list[Placement]:
    """This process's live groups that are copied into dead groups' slots.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`RowLayout`]): Where the groups lie.
        pairs (`Sequence`): `(dead slot, live slot)` of all processes that share the buffer.
        fields ([`FieldTable`]): How to cut each key.
    """
    exchanges = rows.exchanges([dead for dead, _ in pairs], [live for _, live in pairs], rows)
    groups = cut(batch, fields.exact(), [one.source for one in exchanges])
    return [one.placement(group) for one, group in zip(exchanges, groups, strict=True)]
