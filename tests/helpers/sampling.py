"""What was drawn, written down by hand: whole groups, as the mixer `whole` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_replay.decision import Sampled, Taken


def whole(
    slots: Sequence[int],
    serials: Sequence[int] | None = None,
    ages: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    priorities: Sequence[float] | None = None,
    size: int = 4,
) -> Sampled:
    """An entry in each slot, of which it takes all rows."""
    count = len(slots)
    taken = []
    for number, slot in enumerate(slots):
        one = Taken(
            slot=slot,
            serial=(serials or range(count))[number],
            row=(rows or range(count))[number],
            age=(ages or [1] * count)[number],
            priority=(priorities or [1.0] * count)[number],
            targets=np.arange(size),
            sources=np.arange(size),
        )
        taken.append(one)
    return Sampled(taken)
