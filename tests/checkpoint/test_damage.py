"""Damaged checkpoints: whatever happens to their bytes, our error or what was saved; and kills at any moment."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from resuming import build, differences, state, train

import trl_replay
from trl_replay import CheckpointError
from trl_replay.checkpoint import session_state as checkpoint

EXAMPLES = 250
FILES = ("state.json", "table.safetensors", "candidates.safetensors", "payload-00000.safetensors")


class Resumable:
    """A checkpoint, a session that can read it, and the state that it holds."""

    def __init__(self, folder: Path) -> None:
        _, _ = train(folder, max_steps=6)
        self.source = folder / "checkpoint-6" / "trl_replay"
        self.copy = folder / "copy"
        self.trainer = build(folder)
        self.session = trl_replay.attach(self.trainer, replay_buffer_size=5)
        self.fresh()
        self.load()
        self.expected = state(self.session)

    def fresh(self) -> Path:
        """A copy of the files, whole."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.source, self.copy)
        return self.copy / "rank-00000"

    def load(self) -> None:
        states = checkpoint.read(self.session, self.copy)
        checkpoint.apply(self.session, states, self.copy)


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: Any) -> Resumable:
    return Resumable(tmp_path_factory.mktemp("damaged"))


def damaged(data: bytes, kind: str, place: float, length: int, filling: bytes) -> bytes:
    """`data` with something done to it at `place`, a share of its length."""
    at = min(int(place * len(data)), len(data) - 1)
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << length % 8)]) + data[at + 1 :]
    if kind == "overwrite":
        return data[:at] + filling + data[at + len(filling) :]
    if kind == "insert":
        return data[:at] + filling + data[at:]
    if kind == "drop":
        return data[:at] + data[at + length :]
    return filling


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["cut", "flip", "overwrite", "insert", "drop", "replace"]),
    place=st.one_of(st.floats(0, 1), st.floats(0, 0.05)),
    length=st.integers(1, 64),
    filling=st.one_of(st.binary(max_size=64), st.just(b"cos\nsystem\n(S'exit 1'\ntR."), st.just(b'{"a": 1}')),
)
def test_damaged_bytes_give_our_error_or_exactly_what_was_saved(
    resumable: Resumable, name: str, kind: str, place: float, length: int, filling: bytes
) -> None:
    path = resumable.fresh() / name
    path.write_bytes(damaged(path.read_bytes(), kind, place, length, filling))
    try:
        resumable.load()
    except CheckpointError:
        return
    assert not differences(resumable.expected, state(resumable.session))


def test_a_pickle_in_the_place_of_a_file_is_not_run(resumable: Resumable, tmp_path: Path) -> None:
    target = tmp_path / "run"
    code = f"cos\nsystem\n(S'touch {target}'\ntR.".encode()
    for name in FILES:
        (resumable.fresh() / name).write_bytes(code)
        with pytest.raises(CheckpointError):
            resumable.load()
    assert not target.exists()


def load_benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_that_is_killed_at_random_moments_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    kills = load_benchmark("kills")
    outcome = kills.run(tmp_path, kills=4, seed=1, kind=kills.Run(updates=60, processes=1, scope="process"))
    assert outcome["kills"] >= 4
    assert outcome["identical"]
