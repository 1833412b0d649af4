"""Copies from the device: what is kept long does not stay in pinned memory."""

from __future__ import annotations

import pytest
import torch

from trl_replay.base.transfer import begin


def test_what_is_stored_leaves_pinned_memory_and_what_is_pageable_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned, pageable = torch.arange(5), torch.arange(3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) == 5)
    copies = begin({"pinned": pinned, "pageable": pageable})
    read, kept = copies.wait(), copies.unpinned()
    assert torch.equal(kept["pinned"], pinned)
    assert kept["pinned"].data_ptr() != read["pinned"].data_ptr()
    assert kept["pageable"].data_ptr() == pageable.data_ptr()
