"""The demo with its picture."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from trl_replay.cli.commands import main
from trl_replay.demo import arms, lock, show
from trl_replay.demo.arms import News
from trl_replay.demo.record import Record


def test_demo_trains_both_arms_and_leaves_a_table_a_picture_and_figures(capsys, tmp_path):
    assert main(["demo", "--steps", "12", "--seeds", "3", "--out", str(tmp_path)]) == 0
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


def test_demo_without_matplotlib_says_how_to_get_the_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(show, "_has_matplotlib", lambda: False)
    monkeypatch.setattr(show, "train_arms", quickly)
    assert main(["demo", "--seeds", "3", "4", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pip install 'trl-replay[demo]'" in out
    assert "(0.10, 0.10)" in out, "each seed's value"
    assert not (tmp_path / "demo.png").exists()


def quickly(seeds, steps, listen):
    """What two arms would give, without training them."""
    return [
        Record(arm, seed, 1e-3, None, [0.1] * steps, [0.9] * steps, [0.9] * steps, rollouts_at=[64] * steps)
        for arm in show.ARMS
        for seed in seeds
    ]


def test_in_a_file_a_line_comes_every_few_seconds_whether_or_not_there_are_news(monkeypatch):
    assert show.EVERY < 10
    clock = iter([0.0, 5.0, 9.0, 10.0, 18.0])
    monkeypatch.setattr(show.time, "monotonic", lambda: next(clock))
    written = io.StringIO()
    with show.Lines(Console(file=written), 400, [0, 1]) as lines:
        for news in (None, None, News("replay", 1, 120, 0.25, 0.9, 0.1), None):
            lines.hear(news)
    assert written.getvalue().splitlines() == [
        "   9 s  stock GRPO: getting ready; with replay: getting ready",
        "  18 s  stock GRPO: getting ready; with replay: seed 1, update 120 of 400, reward 0.25, dead 90% → 10%",
    ]


def test_in_a_terminal_each_run_has_a_bar():
    written = io.StringIO()
    with show.Bars(Console(file=written, width=150, force_terminal=True), 400, [0, 1]) as bars:
        bars.hear(None)
        bars.hear(News("replay", 1, 120, 0.25, 0.9, 0.1))
    for words in ("stock GRPO, seed 0", "with replay, seed 1", "120/400", "reward 0.25"):
        assert words in written.getvalue()


def test_an_arm_that_fails_ends_the_demo(tmp_path, monkeypatch):
    """Threads stand in for the processes, which take seconds to begin."""
    monkeypatch.setattr(arms, "ProcessPoolExecutor", lambda number, *process: ThreadPoolExecutor(number))
    monkeypatch.setattr(arms, "train_arm", failing)
    with pytest.raises(RuntimeError, match="no luck"):
        main(["demo", "--steps", "2", "--out", str(tmp_path)])


def failing(arm, seeds, steps):
    raise RuntimeError("no luck")


def test_the_lock_starts_from_uniformly_random_codes():
    record = lock.run("stock", 3, 1e-9, 20)
    assert 0.85 < sum(record.dead) / 20 <= 1, "about 97 % of the groups are dead at the start"
    assert record.dead_after == record.dead


def test_reached_is_the_end_of_the_first_window_that_is_good_enough():
    rollouts = [64 * step for step in range(1, 101)]
    record = Record("stock", 0, 1e-3, None, reward=[0.0] * 60 + [0.5] * 40, rollouts_at=rollouts)
    assert record.reached(0.25, 50) == (60 + 25) * 64
    assert record.reached(0.25, 100) is None
    assert record.reached(0.25, 200) is None
    assert record.final(40) == 0.5
    assert record.curve(50) == [0.0, 0.4]
