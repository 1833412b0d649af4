"""A checkpoint of two processes from before the package moved into folders, resumed by two."""

from __future__ import annotations

import json
from pathlib import Path

from forked import check, launch
from old_checkpoints import SHARDED, Written, copied

SCRIPT = Path(__file__).parent / "ranks" / "old_checkpoints_ranks.py"
LIMIT = 300
"""Seconds after which a launch counts as hanging."""


def test_each_rank_takes_what_it_wrote_and_both_train_on(tmp_path: Path) -> None:
    """That each rank takes what its files say is checked on the ranks themselves."""
    copied(SHARDED, tmp_path)
    check(launch(SCRIPT, tmp_path, limit=LIMIT, local_ranks=(0, 1)))
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert first["update"] == second["update"] == 12
    for name in ("serials", "owners", "drifts"):
        assert first[name] == second[name], "the table is the same on both"
    assert sorted([*first["held"], *second["held"]], key=int) == [str(serial) for serial in sorted(first["serials"])]
    before = Written(SHARDED, 0).session["totals"]["counters"]["replaced"]
    assert first["replaced"] == second["replaced"] > before
