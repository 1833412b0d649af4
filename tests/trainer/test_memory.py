"""Memory and disk: bytes bound the buffer, the disk may be full, and everything is given back."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import LAYOUTS, build, differences, everything, train
from support import DEAD, HALF, LIVE, Rewards, record

import trl_replay
from trl_replay import ConfigurationError, Group, ReplayConfig, StorageFullError
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.sizes import format_bytes, parse_bytes
from trl_replay.strategies.disk import DiskStorage
from trl_replay.strategies.storages import CpuStorage
from trl_replay.testing import make_trainer


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5 kb", 1500), (4096, 4096), ("4096", 4096), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text: Any, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert ReplayConfig(replay_max_bytes=text).replay_max_bytes == text


@pytest.mark.parametrize("text", ["much", "-5MB", "0", 0, "5 XB", True, 1.5, "MB", ""])
def test_what_is_no_size_is_refused_naming_the_setting(text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"replay_max_bytes=.* can't be used: .*'512MB'"):
        ReplayConfig(replay_max_bytes=text)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (12, 1500, 2_340_000, 5 * 10**9)] == ["12 B", "1.5 KB", "2.34 MB", "5 GB"]


def group_of(nbytes: int) -> Group:
    return Group({"x": torch.zeros(nbytes - 16, dtype=torch.uint8)}, frozenset({"x"}), np.array([1]), np.array([1]))


def filled(max_bytes: int, sizes: list[int], scores: list[float]) -> ReplayBuffer:
    buffer = ReplayBuffer(100, CpuStorage(), Limits(), max_bytes)
    for serial, (size, score) in enumerate(zip(sizes, scores, strict=True)):
        columns = {"serial": np.array([serial]), "score": np.array([score]), "nbytes": np.array([size])}
        stored, _ = buffer.offer(columns, lambda table: table.score, np.random.default_rng(0))
        buffer.receive({number: group_of(size) for number in stored})
    return buffer


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


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_bytes_bound_a_real_run_and_the_warning_tells_what_a_group_costs(tmp_path: Path, scope: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    session = trl_replay.attach(trainer, replay_max_bytes="1KB", replay_scope=scope, replay_evictor="fifo")
    sizes = []
    step = session.step
    session.step = lambda batch: [step(batch), sizes.append(session.buffer.nbytes)][0]
    with pytest.warns(UserWarning, match=r"replay_max_bytes \(1 KB\) is reached with \d of replay_buffer_size=64"):
        trainer.train()
    assert 0 < max(sizes) <= 1000
    assert 2 <= len(session.buffer) < 6
    assert session.totals.counters["evicted"] > 0


def test_a_group_larger_than_all_the_bytes_is_refused_and_evicts_nobody(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=3)
    session = trl_replay.attach(trainer, replay_max_bytes=200)
    trainer.train()
    assert len(session.buffer) == 0
    assert "it alone is larger than replay_max_bytes" in session.explain()


def test_groups_whichever_limit_is_reached_first_evicts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=4)
    session = trl_replay.attach(trainer, replay_max_bytes="1GB", replay_buffer_size=3)
    trainer.train()  # no warning: bytes were never the reason
    assert len(session.buffer) == 3


# bfloat16


def test_log_probs_in_bfloat16_take_half_the_room_and_err_by_less_than_what_is_documented(tmp_path: Path) -> None:
    held = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=1, learning_rate=0.0)
        session = trl_replay.attach(trainer, replay_logps_dtype=dtype)
        trainer.train()
        held[dtype] = [session.buffer.load(serial) for serial in session.buffer.held()]
    assert held["float32"]
    for full, half in zip(held["float32"], held["bfloat16"], strict=True):
        logps, rounded = full.tensors["old_per_token_logps"], half.tensors["old_per_token_logps"]
        assert rounded.dtype == torch.bfloat16
        assert full.nbytes - half.nbytes == 2 * logps.numel()
        assert bool(((rounded.float() - logps).abs() <= 2.0**-8 * logps.abs()).all())


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}])
def test_training_replays_from_bfloat16_and_resumes_bit_identically(tmp_path: Path, settings: dict[str, Any]) -> None:
    replay = {"replay_logps_dtype": "bfloat16"}
    whole = everything(*train(tmp_path, **replay, **settings))
    assert whole["totals"][1]["replaced"] > 0
    again = build(tmp_path, **settings)
    if settings:
        again.ref_model.load_state_dict(reference(tmp_path))
    resumed = everything(*train(tmp_path, trainer=again, resume=str(tmp_path / "checkpoint-6"), **replay))
    assert not differences(whole, resumed)


def reference(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder / "initial_model").state_dict())


# disk


def disk(folder: Path, **arguments: Any) -> dict[str, Any]:
    return {"replay_storage": "disk", "replay_storage_kwargs": {"folder": str(folder), **arguments}}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_payload_on_disk_is_training_with_payload_in_memory(tmp_path: Path, layout: str) -> None:
    memory = everything(*train(tmp_path / "memory", **LAYOUTS[layout]))
    trainer, session = train(tmp_path / "disk", **LAYOUTS[layout], **disk(tmp_path / "payload"))
    on_disk = everything(trainer, session)
    assert memory["totals"][1]["replaced"] > 0
    del memory["totals"][1]["bytes"], on_disk["totals"][1]["bytes"]
    del memory["metrics"]["replay/bytes"], on_disk["metrics"]["replay/bytes"]
    assert not differences(memory, on_disk)
    assert len(files(tmp_path / "payload")) == len(session.buffer), "what left the buffer left the disk"
    resumed = train(
        tmp_path / "disk",
        resume=str(tmp_path / "disk" / "checkpoint-6"),
        **LAYOUTS[layout],
        **disk(tmp_path / "other"),
    )
    assert differences(on_disk, everything(*resumed)) in ([], ["totals", "metrics"])


def test_the_folder_is_needed_and_a_bad_bound_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]))
    with pytest.raises(ConfigurationError, match="disk: name a folder on a disk with room"):
        trl_replay.attach(trainer, replay_storage="disk")
    with pytest.raises(ConfigurationError, match="disk: max_bytes='lots' can't be used"):
        trl_replay.attach(trainer, **disk(tmp_path, max_bytes="lots"))


def test_the_folder_goes_with_its_storage_and_a_killed_processs_with_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom trl_replay.strategies.disk import DiskStorage\n"
        "kept = DiskStorage(sys.argv[1])\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(trl_replay.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    storage = DiskStorage(tmp_path)
    other = DiskStorage(tmp_path)
    assert not left.exists(), "its process has died"
    assert storage.folder.exists(), "this one lives"
    for each in (storage, other):
        each.put(1, group_of(100))
    folder = storage.folder
    del storage, each
    gc.collect()
    assert not folder.exists()
    assert other.get(1).nbytes == 100
    assert list(tmp_path.iterdir()) == [other.folder]


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk takes two groups; later ones find room only when a stored one leaves."""
    from trl_replay.serialization import group_files

    write = group_files.write

    def full(path: Path, groups: Any) -> None:
        if len(files(tmp_path / "payload")) >= 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, groups)

    monkeypatch.setattr(group_files, "write", full)
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=5)
    session = trl_replay.attach(trainer, **disk(tmp_path / "payload"))
    steps = record(session)
    with pytest.warns(
        UserWarning, match=r"no room for further groups \(training goes on without.* is full: .*No space"
    ):
        trainer.train()
    assert len(steps) == 5
    assert len(files(tmp_path / "payload")) == 2
    assert len(session.buffer) - len(session.buffer.overflow) == 2
    assert session.totals.counters["replaced"] == 4, "groups without a place are still replayed once they are there"
    assert "the storage had no room for it" in session.explain()
    assert not list((tmp_path / "payload").rglob("*half*"))


@pytest.mark.parametrize("scope", ["process", "gathered", "sharded"])
def test_a_bounded_folder_never_grows_beyond_its_bound(tmp_path: Path, scope: str) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, DEAD]), max_steps=6)
    session = trl_replay.attach(trainer, replay_scope=scope, **disk(tmp_path / "payload", max_bytes="3KB"))
    with pytest.warns(UserWarning, match="no room for further groups"):
        trainer.train()
    assert sum(path.stat().st_size for path in files(tmp_path / "payload")) == session.buffer.storage.nbytes <= 3000
    assert session.totals.counters["replaced"] > 0


def test_a_storage_without_room_says_so(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, max_bytes=1000)
    with pytest.raises(StorageFullError, match="max_bytes=1000"):
        storage.put(1, group_of(5000))
    assert storage.nbytes == 0
    assert files(tmp_path) == []


def test_another_error_while_writing_is_raised(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    (storage.folder / "0").write_text("in the way")
    with pytest.raises(FileExistsError):
        storage.put(1, group_of(50))


# given back


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
