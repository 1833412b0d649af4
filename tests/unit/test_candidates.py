"""Candidates: the sums of their log-probs, and which of them can be stored."""

import numpy as np
import torch

from trl_replay.batch.groups import Candidate, PendingGroups
from trl_replay.data.counters import Tally
from trl_replay.data.types import Group
from trl_replay.testing import make_groups


def group(**tensors):
    """Three rows of 3, 1 and 2 tokens."""
    made = {key: torch.as_tensor(values) for key, values in tensors.items()}
    return Group(made, frozenset(made), np.array([2]), np.array([3, 1, 2]))


LOGPS = [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0]
NAN, INF = float("nan"), float("inf")


def test_only_candidates_of_which_every_row_is_known_and_finite_are_stored():
    candidates = [Candidate(slot, slot, None, frozenset(), slice(0, 0), 0) for slot in range(3)]
    waiting = PendingGroups(make_groups([[1.0, 0.0, 0.0]] * 3), candidates)
    logps = [[-1.0, -2.0, -3.0], [-1.0, -INF, -3.0], [NAN] * 3]
    shared = {"recorded": np.array([1, 1, 1, 1, 1, 1, 1, 0, 1]), "logps": np.ravel(logps)}
    tally = Tally()
    usable, groups = waiting.admissible(shared, tally)
    assert [one.serial for one in usable] == [0, 1]
    assert groups is not None
    assert groups.behavior_logps is not None
    assert groups.behavior_logps[0].tolist() == [-1.0, -2.0, -3.0]
    assert tally.refused == 1
    assert tally.reasons == {"a group was refused: a row's first forward was missing or came after an update": 1}
