"""`trl-replay demo`: it needs the package alone, and leaves two logs, what they say, and a page.

Teaching the model to answer at random takes longer than all else here: it is done once, for one seed.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from trl_replay import demo
from trl_replay.cli import demo as command
from trl_replay.cli import main

SEED = 3


@pytest.fixture(scope="module")
def taught():
    """The weights that the lock starts from: kept by this process."""
    return demo.taught(SEED)


def beside(status, call):
    """In the place of `Popen`: runs the command in this process, first."""
    popen = command.subprocess.Popen

    def start(given, **options):
        if given[:4] != [sys.executable, "-m", "trl_replay", "demo"]:
            return popen(given, **options)  # on a new machine, matplotlib looks for fonts
        call(given[3:])
        return SimpleNamespace(wait=lambda: status, kill=lambda: None)

    return start


@pytest.mark.generates
def test_the_demo_trains_both_arms_and_reports_how_they_differ(taught, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command.subprocess, "Popen", beside(0, main))
    monkeypatch.setattr(demo, "EVERY", 4)
    assert main(["demo", "--steps", "12", "--seed", str(SEED), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "stock, update 12: " in shown.err
    assert "replay, update 12: " in shown.err
    assert "By reward, replay ends at " in shown.out
    assert "768" in shown.out
    assert f"written: {tmp_path / 'report.html'}" in shown.out
    assert "<svg" in (tmp_path / "report.html").read_text()
    logs = {}
    for arm in demo.ARMS:
        history = json.loads((tmp_path / arm / "trainer_state.json").read_text())["log_history"]
        logs[arm] = [entry for entry in history if "loss" in entry]
    assert not any(key.startswith("replay/") for entry in logs["stock"] for key in entry)
    dead, after = (sum(entry[f"replay/dead_fraction{end}"] for entry in logs["replay"]) for end in ("", "_after"))
    assert after < dead, "replay replaced no dead group"
    assert sum(entry["frac_reward_zero_std"] for entry in logs["stock"]) / 12 > 0.85, "the codes are random"


def test_a_demo_without_updates_is_refused(capsys):
    assert main(["demo", "--steps", "0"]) == 1
    assert "--steps=0 can't be used" in capsys.readouterr().err


def test_an_arm_that_fails_ends_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command.subprocess, "Popen", beside(1, lambda arguments: None))
    monkeypatch.setattr(demo, "train", lambda *arguments: None)
    assert main(["demo", "--steps", "2", "--out", str(tmp_path)]) == 1
    assert "Stock GRPO ended with an error" in capsys.readouterr().err
