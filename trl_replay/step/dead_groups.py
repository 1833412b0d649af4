"""Dead groups that nothing fills: which they are, and which live groups of the same batch are copied there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..batch.compose import cut
from ..distributed.row_layout import RowLayout
from ..fields import FieldTable
from ..plan import Sampled
from ..types import Batch, Groups, Placement

NO_ENTRY = -1
"""Serial number of a copy."""


def dead_slots(fresh: Groups, filled: Sequence[int]) -> list[int]:
    """The dead groups that replay did not fill."""
    dead = np.flatnonzero(fresh.dead).tolist()
    return [slot for slot in dead if slot not in set(filled)]


def copies(fresh: Groups, sampled: Sampled, rows: RowLayout, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Pairs (dead slot, live slot of the same process that is copied there): every live group once before any twice.

    A group whose rows lie on several processes is neither filled nor copied.
    """
    homes = [rows.home(slot) for slot in range(len(fresh))]
    pairs: list[tuple[int, int]] = []
    for home in sorted({home for home in homes if home is not None}):
        here = [slot for slot, at in enumerate(homes) if at == home and slot not in sampled.slots]
        live = [slot for slot in here if not fresh.dead[slot]]
        empty = [slot for slot in here if fresh.dead[slot]]
        if not (live and empty):
            continue
        rounds = -(-len(empty) // len(live))
        order = np.concatenate([rng.permutation(live) for _ in range(rounds)])
        pairs += zip(empty, order.tolist(), strict=False)
    return pairs


def place_copies(
    batch: Batch, rows: RowLayout, pairs: Sequence[tuple[int, int]], fields: FieldTable
) -> list[Placement]:
    """This process's live groups that are copied into dead groups' slots.

    Args:
        batch (`dict`): As TRL returned it.
        rows ([`RowLayout`]): Where the groups lie.
        pairs (`Sequence`): `(dead slot, live slot)` of all processes that share the buffer.
        fields ([`FieldTable`]): How to cut each key.
    """
    here = []
    for dead, live in pairs:
        to, _ = rows.local(dead)
        source, _ = rows.local(live)
        if to.stop:
            here.append((dead, to, source))
    groups = cut(batch, fields.exact(), [source for _, _, source in here])
    placements = []
    for (slot, to, _), group in zip(here, groups, strict=True):
        placements.append(Placement(slot, group, NO_ENTRY, 0, to.start, 0, to.stop - to.start))
    return placements
