"""The demo with its picture, and the example that trains on its lock with two processes.

Teaching the model to answer at random takes longer than all else here: it is done once, for one seed.
"""

from __future__ import annotations

import io
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import combination_lock as lock
import pytest
import torch
from combination_lock import News, Record
from forked import check, launch
from rich.console import Console

HERE = Path(__file__).parent
SEED = 3
LIMIT = 300
"""Seconds after which a launch counts as hanging."""


@pytest.fixture(scope="module")
def taught():
    """The weights that the lock starts from: kept by this process, for its forks too."""
    return lock.taught(SEED)


def test_demo_trains_both_arms_and_leaves_a_table_a_picture_and_figures(taught, capsys, tmp_path, monkeypatch):
    """In forks of this process: that they can be processes which begin anew is the next test's."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(lock.multiprocessing, "get_context", lambda method: fork)
    assert lock.show(12, [SEED], tmp_path) == 0
    out = capsys.readouterr().out
    for words in ("side by side", "stock GRPO", "with replay", "Seeds 3", "benchmarks/learning.py", "demo.png"):
        assert words in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "demo.json").read_text())
    assert [(record["arm"], record["rollouts"]) for record in records] == [("stock", 768), ("replay", 768)]
    assert [record["learning_rate"] for record in records] == list(lock.LEARNING_RATES.values())
    stock, replay = records
    assert stock["dead"] == stock["dead_after"]
    assert sum(replay["dead_after"]) < sum(replay["dead"]), "replay replaced no dead group"


def test_an_arm_trains_in_a_process_that_begins_anew(monkeypatch):
    """It imports everything, and finds no seed to train."""
    monkeypatch.setattr(lock, "ARMS", {"stock": None})
    heard = []
    assert lock.train_arms([], 2, heard.append) == []
    assert set(heard) == {None}, "no news for more than a second"


def test_demo_without_matplotlib_says_how_to_get_the_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_has_matplotlib", lambda: False)
    monkeypatch.setattr(lock, "train_arms", quickly)
    assert lock.show(400, [3, 4], tmp_path) == 0
    out = capsys.readouterr().out
    assert "pip install 'trl-replay[demo]'" in out
    assert "(0.10, 0.10)" in out, "each seed's value"
    assert not (tmp_path / "demo.png").exists()


def quickly(seeds, steps, listen):
    """What two arms would give, without training them."""
    return [
        Record(arm, seed, 1e-3, None, [0.1] * steps, [0.9] * steps, [0.9] * steps, rollouts_at=[64] * steps)
        for arm in lock.ARMS
        for seed in seeds
    ]


def test_in_a_file_a_line_comes_every_few_seconds_whether_or_not_there_are_news(monkeypatch):
    assert lock.EVERY < 10
    clock = iter([0.0, 5.0, 9.0, 10.0, 18.0])
    monkeypatch.setattr(lock.time, "monotonic", lambda: next(clock))
    written = io.StringIO()
    with lock.Lines(Console(file=written), 400, [0, 1]) as lines:
        for news in (None, None, News("replay", 1, 120, 0.25, 0.9, 0.1), None):
            lines.hear(news)
    assert written.getvalue().splitlines() == [
        "   9 s  stock GRPO: getting ready; with replay: getting ready",
        "  18 s  stock GRPO: getting ready; with replay: seed 1, update 120 of 400, reward 0.25, dead 90% → 10%",
    ]


def test_in_a_terminal_each_run_has_a_bar():
    written = io.StringIO()
    with lock.Bars(Console(file=written, width=150, force_terminal=True), 400, [0, 1]) as bars:
        bars.hear(None)
        bars.hear(News("replay", 1, 120, 0.25, 0.9, 0.1))
    for words in ("stock GRPO, seed 0", "with replay, seed 1", "120/400", "reward 0.25"):
        assert words in written.getvalue()


def test_an_arm_that_fails_ends_the_demo(tmp_path, monkeypatch):
    """Threads stand in for the processes, which take seconds to begin."""
    monkeypatch.setattr(lock, "ProcessPoolExecutor", lambda number, *process: ThreadPoolExecutor(number))
    monkeypatch.setattr(lock, "train_arm", failing)
    monkeypatch.setattr(lock, "PAUSE", 0.05)
    with pytest.raises(RuntimeError, match="no luck"):
        lock.show(2, [0], tmp_path)


def failing(arm, seeds, steps):
    raise RuntimeError("no luck")


def test_the_lock_starts_from_uniformly_random_codes(taught):
    record = lock.run("stock", SEED, 1e-9, 20)
    assert 0.85 < sum(record.dead) / 20 <= 1, "about 97 % of the groups are dead at the start"
    assert record.dead_after == record.dead


def test_the_example_trains_on_two_processes_with_each_scope(taught, tmp_path):
    torch.save(dict(taught), tmp_path / "taught.pt")
    launched = launch(
        HERE / "on_the_lock.py", tmp_path / "taught.pt", HERE.parents[1] / "examples" / "lock_two_processes.py",
        "--scope", "process,gathered,sharded", "--steps", 6, "--seeds", SEED, "--json", tmp_path / "runs.jsonl",
        limit=LIMIT, local_ranks=(0, 1),
    )  # fmt: skip
    check(launched)
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [record["arm"] for record in runs] == ["process", "gathered", "sharded"]
    for trained in runs:
        assert trained["processes"] == 2
        assert len(trained["reward"]) == 6
        assert trained["rollouts"] == 6 * 64, "the same completions as one process has"
        assert trained["explanation"].startswith("replay on rank 0 of 2: 6 generation batches")


def test_reached_is_the_end_of_the_first_window_that_is_good_enough():
    rollouts = [64 * step for step in range(1, 101)]
    record = Record("stock", 0, 1e-3, None, reward=[0.0] * 60 + [0.5] * 40, rollouts_at=rollouts)
    assert record.reached(0.25, 50) == (60 + 25) * 64
    assert record.reached(0.25, 100) is None
    assert record.reached(0.25, 200) is None
    assert record.final(40) == 0.5
    assert record.curve(50) == [0.0, 0.4]
