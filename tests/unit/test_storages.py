"""Storages in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trl_replay import Group
from trl_replay.strategies.storages import CpuStorage, DeviceStorage


@pytest.mark.parametrize("storage", [CpuStorage(), DeviceStorage()], ids=["cpu", "device"])
def test_a_storage_keeps_copies_and_hands_out_copies(storage):
    tensor = torch.arange(4, dtype=torch.int32)
    group = Group({"completion_ids": tensor}, frozenset(["completion_ids"]), np.array([2]), np.array([1, 3]))
    storage.put(5, group)
    assert storage.nbytes == group.nbytes == 4 * 4 + 3 * 8
    tensor[:] = 9
    storage.get(5).tensors["completion_ids"][:] = 8
    storage.get(5).completion_lengths[:] = 8
    again = storage.get(5)
    assert again.tensors["completion_ids"].tolist() == [0, 1, 2, 3]
    assert again.completion_lengths.tolist() == [1, 3]
    storage.remove(5)
    assert storage.nbytes == 0
