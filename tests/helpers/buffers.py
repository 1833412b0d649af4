"""Payload for buffers that are tested without any."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trl_replay import Group
from trl_replay.data.types import Packed
from trl_replay.serialization.groups import pack

NO_LENGTHS = np.empty(0, np.int64)
NOTHING = pack(Group({}, frozenset(), NO_LENGTHS, NO_LENGTHS))


def nothing(serials: Iterable[int]) -> dict[int, Packed]:
    """For each entry a group without a tensor."""
    return dict.fromkeys(serials, NOTHING)
