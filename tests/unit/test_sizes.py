"""Sizes as people write and read them."""

import pytest

from trl_replay import ReplayConfig
from trl_replay.base.files import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5 kb", 1500), (4096, 4096), ("4096", 4096)]
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes
    assert ReplayConfig(replay_max_bytes=text).replay_max_bytes == text


def test_sizes_are_shown_in_the_unit_that_fits():
    assert [format_bytes(n) for n in (12, 1500, 2_340_000, 5 * 10**9)] == ["12 B", "1.5 KB", "2.34 MB", "5 GB"]
