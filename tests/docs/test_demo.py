"""`trl-replay demo`: it needs the package alone, and its lock trains on two processes, too.

Teaching the model to answer at random takes longer than all else here: it is done once, for one seed.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import check, launch
from trl_replay.demo.lock import Record

from trl_replay.cli import main
from trl_replay.demo import arms, lock, showing

HERE = Path(__file__).parent
SEED = 3
LIMIT = 300
"""Seconds after which a launch counts as hanging."""


@pytest.fixture(scope="module")
def taught():
    """The weights that the lock starts from: kept by this process."""
    return lock.taught(SEED)


def beside(status, call):
    """In the place of `Popen`: runs the command in this process, first."""

    def start(command):
        assert command[:4] == [sys.executable, "-m", "trl_replay", "demo"]
        call(command[3:])
        return SimpleNamespace(wait=lambda: status, kill=lambda: None)

    return start


def test_the_demo_trains_both_arms_and_leaves_progress_an_outcome_a_table_and_a_picture(
    taught, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(arms.subprocess, "Popen", beside(0, main))
    monkeypatch.setattr(lock, "EVERY", 0.0)
    assert main(["demo", "--steps", "12", "--seeds", str(SEED), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "with replay, seed 3, update 12: " in shown.err
    sentence = r"After 768 completions each, \d+% of the answers are right with replay, and \d+% without\."
    assert re.search(rf"^{sentence}$", shown.out, re.MULTILINE)
    assert re.search(r"│ with replay │ +[▁▂▃▄▅▆▇█]{12} +│", shown.out)
    assert f"written: {tmp_path / 'demo.png'}" in shown.out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    stock, replay = (json.loads((tmp_path / f"{arm}.jsonl").read_text()) for arm in ("stock", "replay"))
    assert (stock["rollouts"], replay["rollouts"]) == (768, 768)
    assert [stock["learning_rate"], replay["learning_rate"]] == list(lock.LEARNING_RATES.values())
    assert stock["dead"] == stock["dead_after"]
    assert sum(replay["dead_after"]) < sum(replay["dead"]), "replay replaced no dead group"


def made_up(arm, seed, reward):
    rollouts = [64 * step for step in range(1, 101)]
    made = {"dead": [0.9] * 100, "dead_after": [0.1] * 100, "rollouts_at": rollouts, "rollouts": 6400}
    return Record(arm, seed, 1e-3, None, reward=[0.0] * 50 + [reward] * 50, **made)


def test_the_outcome_and_the_table_are_means_over_seeds_and_one_value_a_seed(tmp_path):
    records = [
        made_up("stock", 0, 0.0),
        made_up("stock", 1, 0.1),
        made_up("replay", 0, 0.5),
        made_up("replay", 1, 0.9),
    ]
    told = "After 6,400 completions each, 70% of the answers are right with replay, and 5% without."
    assert showing.outcome(records) == told
    columns = [list(column.cells) for column in showing.table(records).columns]
    assert [cells[1] for cells in columns[:4]] == [
        "with replay",
        "▁" * 10 + "▆" * 10,
        "70% (50%, 90%)",
        "4,800; 4,096",
    ]
    assert columns[3][0] == "never; never"


def test_where_matplotlib_is_missing_the_demo_says_how_to_get_the_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = showing.draw([made_up("stock", 0, 0.0)], tmp_path / "demo.png")
    assert told == "For a picture: pip install matplotlib, and run this again."
    assert not (tmp_path / "demo.png").exists()


def test_the_bars_of_a_terminal_without_such_characters_are_plain(monkeypatch):
    monkeypatch.setattr(showing.sys, "stdout", SimpleNamespace(encoding="ascii"))
    assert showing.bars([0.0, 0.5, 1.0]) == ".+@"


def test_a_demo_without_updates_is_refused(capsys):
    assert main(["demo", "--steps", "0"]) == 1
    assert "--steps=0 can't be used" in capsys.readouterr().err


def test_an_arm_that_fails_ends_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arms.subprocess, "Popen", beside(1, lambda arguments: None))
    monkeypatch.setattr(arms, "run_arm", lambda *arguments: [])
    assert main(["demo", "--steps", "2", "--out", str(tmp_path)]) == 1
    assert "Stock GRPO ended with an error" in capsys.readouterr().err


def test_the_lock_starts_from_uniformly_random_codes(taught):
    record = lock.run("stock", SEED, 1e-9, 20)
    assert 0.85 < sum(record.dead) / 20 <= 1, "about 97 % of the groups are dead at the start"
    assert record.dead_after == record.dead


def test_the_example_trains_on_two_processes_with_each_scope(taught, tmp_path):
    torch.save(dict(taught), tmp_path / "taught.pt")
    for scope in ("process", "gathered"):
        launched = launch(
            HERE / "on_the_lock.py", tmp_path / "taught.pt", "--arm", "replay", "--scope", scope,
            "--steps", 6, "--seeds", SEED, "--out", tmp_path, limit=LIMIT, local_ranks=(0, 1),
        )  # fmt: skip
        check(launched)
    runs = [json.loads(line) for line in (tmp_path / "replay.jsonl").read_text().splitlines()]
    assert [trained["scope"] for trained in runs] == ["process", "gathered"]
    for trained in runs:
        assert trained["processes"] == 2
        assert len(trained["reward"]) == 6
        assert trained["rollouts"] == 6 * 64, "the same completions as one process has"
        assert "\nreplay on rank 0 of 2: 6 generation batches" in trained["explanation"]


def test_reached_is_the_end_of_the_first_window_that_is_good_enough():
    rollouts = [64 * step for step in range(1, 101)]
    record = Record("stock", 0, 1e-3, None, reward=[0.0] * 60 + [0.5] * 40, rollouts_at=rollouts)
    assert record.reached(0.25, 50) == (60 + 25) * 64
    assert record.reached(0.25, 100) is None
    assert record.reached(0.25, 200) is None
    assert record.final(40) == 0.5
    assert record.curve(50) == [0.0, 0.4]
