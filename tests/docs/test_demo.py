"""The demo with its picture."""

from __future__ import annotations

import json

from trl_replay.cli.commands import main
from trl_replay.demo import lock, show
from trl_replay.demo.record import Record


def test_demo_trains_both_arms_and_leaves_a_table_a_picture_and_figures(capsys, tmp_path):
    assert main(["demo", "--steps", "12", "--seeds", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in ("stock GRPO", "with replay", "Seeds 3", "benchmarks/learning.py", "demo.png"):
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
    assert main(["demo", "--steps", "2", "--seeds", "3", "--out", str(tmp_path)]) == 0
    assert "pip install 'trl-replay[demo]'" in capsys.readouterr().out
    assert not (tmp_path / "demo.png").exists()


def test_the_lock_starts_from_uniformly_random_codes():
    record = lock.run("stock", 3, 1e-9, 20)
    assert 0.85 < sum(record.dead) / 20 <= 1, "about 97 % of the groups are dead at the start"
    assert record.dead_after == record.dead


def test_reached_is_the_end_of_the_first_window_that_is_good_enough():
    record = Record("stock", 0, 1e-3, None, reward=[0.0] * 60 + [0.5] * 40, rollouts=6400)
    assert record.reached(0.25, 50) == (60 + 25) * 64
    assert record.reached(0.25, 100) is None
    assert record.reached(0.25, 200) is None
    assert record.final(40) == 0.5
    assert record.curve(50) == [0.0, 0.4]
