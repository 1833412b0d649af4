"""Payload for buffers that are tested without any."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trl_replay import Group

NO_LENGTHS = np.empty(0, np.int64)
NOTHING = Group({}, frozenset(), NO_LENGTHS, NO_LENGTHS)


def nothing(serials: Iterable[int]) -> dict[int, Group]:
    """For each entry a group without a tensor."""
    return dict.fromkeys(serials, NOTHING)
