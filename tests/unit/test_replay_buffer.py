"""The buffer: capacity in groups and in bytes."""

from __future__ import annotations

import pytest
from buffers import filled

from trl_replay import ReplayError
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.strategies.storages import CpuStorage


def test_over_the_bytes_the_lowest_keep_ranks_leave_until_the_rest_fits() -> None:
    row = ReplayBuffer(1, CpuStorage(), Limits()).table.row_bytes
    with pytest.warns(UserWarning, match=r"replay_max_bytes .* is reached with 3 .*A group costs .* about 2 fit"):
        buffer = filled(3000 + 3 * row, [1000, 800, 1000, 1500], [3.0, 1.0, 1.0, 2.0])
    assert sorted(buffer.table.serial.tolist()) == [0, 3], "the older of two equal ranks left first, then the other"
    assert buffer.nbytes <= 3000 + 3 * row


def test_a_newcomer_of_low_rank_leaves_at_once() -> None:
    row = ReplayBuffer(1, CpuStorage(), Limits()).table.row_bytes
    with pytest.warns(UserWarning, match="a group costs|A group costs"):
        buffer = filled(2000 + 2 * row, [1000, 1000, 600], [3.0, 2.0, 1.0])
    assert buffer.table.serial.tolist() == [0, 1]


def test_a_buffer_of_no_session_takes_nothing() -> None:
    with pytest.raises(ReplayError, match=r"of a session only"):
        ReplayBuffer(1, CpuStorage(), Limits()).add([])
