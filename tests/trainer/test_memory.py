"""What a session takes of memory, measured."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer

pytestmark = pytest.mark.alone


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_memory_is_given_back_after_detach(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    dead, sizes = [], []
    for _ in range(6):
        with trl_replay.attached(trainer) as session:
            trainer.train()
            assert len(session.buffer) > 0
            dead += [weakref.ref(part) for part in (session, session.buffer, session.tap, session.buffer.storage)]
        del session
        gc.collect()
        sizes.append(anonymous())
    assert [part() for part in dead] == [None] * len(dead), "nothing of a detached session is held"
    assert sizes[-1] - sizes[1] < 4 << 20, f"anonymous memory grew: {sizes}"


def test_100000_groups_on_disk_need_little_memory(tmp_path: Path) -> None:
    """A hundredth of benchmarks/disk.py."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import disk as benchmark
    finally:
        sys.path.pop(0)
    outcome = benchmark.run(tmp_path, groups=1000)
    assert outcome["growth of anonymous memory"] < 20e6
    assert outcome["groups"] == 1000
    assert outcome["bytes of files"] > 16_000_000
