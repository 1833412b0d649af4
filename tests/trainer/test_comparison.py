"""`trl-replay report A B`: runs side by side, against numbers by hand, and as a page of real runs."""

import html
import re
import shutil

import numpy as np
import pytest
from support import DEAD, HALF, LIVE, Rewards
from trl_replay.extras.report.comparison import comparison
from trl_replay.extras.report.runs import Run, read_run

import trl_replay
from trl_replay import ReplayError
from trl_replay.testing import make_trainer

STEPS = 6
SCRIPT = [[LIVE, HALF, LIVE], [DEAD, DEAD, LIVE]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a stock run and one with replay."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("stock", "replay"):
        trainer = make_trainer(folder / name, Rewards(*SCRIPT), max_steps=STEPS)
        if name == "replay":
            trl_replay.attach(trainer, replay_start=0)
        trainer.train()
        trainer.save_state()
    return folder


def cells(text):
    """The rows of the table."""
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    return [[html.unescape(cell) for cell in row] for row in rows if row]


def test_two_runs_lie_side_by_side_and_one_seed_each_proves_nothing(runs, said):
    out = runs / "page" / "two.html"
    given = (runs / "stock", runs / "replay", "--out", out, "--completions", 12, "--level", 0.08)
    printed = said("report", *given)
    assert str(out) in printed
    text = out.read_text()
    assert "This proves nothing yet" in text
    assert "This proves nothing yet" in printed, "what the page says first"
    assert "at least 3 seeds, better 5" in text
    stock, replay = cells(text)
    assert (*stock[:2], stock[3]) == ("stock", "36", "3"), "by means over three of six steps"
    assert (*replay[:2], replay[3]) == ("replay", "36", "3"), "the log counts its completions"
    assert [float(row[2]) > 36 for row in (stock, replay)] == [True, True], "tokens"
    assert stock[5:] == ["0.08333", "55.6%", "55.6%"]
    assert replay[5:] == ["0.08333", "55.6%", "0.0%"]
    assert text.count("<svg") == 4
    assert {"completions generated", "updates", "seconds in training steps"} <= set(
        re.findall(r">([^<]+)</text>", text)
    )
    assert "<script" not in text
    assert re.findall(r'(?:href|src)="(?!#)', text) == []
    assert re.findall(r"<svg[^>]* width=", text), "the page's style makes it as wide as its card"
    assert "svg{width:100%;height:auto" in text


def test_a_log_without_counts_of_completions_shows_none(runs):
    first, second = read_run(str(runs / "stock")), read_run(f"mine={runs / 'replay'}")
    assert second.label == "mine"
    rows = cells(comparison([first, second], level=0.08))
    assert [row[1] for row in rows] == ["–", "36"]
    assert all(row[3] != "–" for row in rows), "both logs have seconds"


def made_up(label, rewards, **more):
    log = [{"step": step, "reward": reward, "frac_reward_zero_std": 0.5} for step, reward in enumerate(rewards, 1)]
    for name, values in more.items():
        for entry, value in zip(log, values, strict=True):
            entry[name] = value
    return Run(label, log, 8)


def test_where_a_reward_is_reached_by_hand():
    """Of 40 steps means over 4, crossed between two of them; 2 seconds an update."""
    tokens = [30.0 * step for step in range(1, 41)]
    run = made_up("a", [0.0] * 9 + [0.4] + [0.8] * 30, step_time=[2.0] * 40, num_tokens=tokens)
    assert run.final("reward") == pytest.approx(0.8)
    assert run.reached("reward", 0.6) == [100, 375, 12.5, 25]
    assert run.reached("reward", 0.9) == [np.inf] * 4
    assert run.reached("reward", 0.2) == [84, 315, 10.5, 21]


def test_three_seeds_a_label_are_enough_to_tell_a_difference():
    ends = {"a": (0.1, 0.2, 0.3), "b": (0.4, 0.6, 0.5)}
    runs = [made_up(label, [end] * 4) for label in ends for end in ends[label]]
    text = comparison(runs)
    assert "By reward, b ends 0.3 above a (0.5 and 0.2, means of 3 runs each)." in text
    assert "proves nothing" not in text
    assert "proves nothing" in comparison(runs[:-1]), "b has two"
    assert re.findall(r"> (a|b)</text>", text) == ["a", "b"] * 3, "once in each legend"


@pytest.mark.parametrize("label", ["<script>alert(1)</script>", "_hidden", "$x_1$ and $y", "ü"])
def test_any_label_is_text(label):
    text = comparison([made_up(label, [0.1, 0.2]), made_up("b", [0.1, 0.2])])
    assert "<script" not in text
    assert f" {label}" in [html.unescape(found) for found in re.findall(r">([^<]+)</text>", text)]


def test_a_run_without_a_step_of_grpo_is_refused(write_log, said):
    path = write_log({"loss": 1.0})
    with pytest.raises(ReplayError, match="holds no step of GRPO"):
        read_run(str(path))
    assert "nothing to compare" in said("report", path, path, fails=True)


def test_the_dead_groups_of_a_run_with_replay_are_those_that_replay_counts():
    """The sum of the rewards differs everywhere, the function that counts in half of the groups."""
    run = made_up("a", [0.1] * 4, **{"replay/dead_fraction": [0.5] * 4, "replay/dead_fraction_after": [0.25] * 4})
    run = run._replace(log=[{**entry, "frac_reward_zero_std": 0.0} for entry in run.log])
    assert [row[6:] for row in cells(comparison([run, made_up("stock", [0.1] * 4)]))] == [
        ["50.0%", "25.0%"],
        ["50.0%", "50.0%"],
    ]


def test_a_level_can_be_reached_where_rewards_are_negative():
    rising = made_up("a", [-1.0, -0.9, -0.7, -0.5])
    text = comparison([rising, made_up("b", [-1.0, -0.9, -0.8, -0.7])])
    assert "To a reward of -0.75<" in text, "the lower end value: a mean over two of four steps"
    assert [row[3] for row in cells(text)] == ["3", "4"]


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path, runs):
    folder = tmp_path / "lr=1e-5,beta=0"
    shutil.copytree(runs / "stock", folder)
    assert [read_run(given).label for given in (f"defaults={folder}", str(folder))] == ["defaults", folder.name]


def test_folders_that_differ_by_a_seed_need_no_label(tmp_path, runs):
    names = ["stock-seed0", "stock-seed1", "preset_s0", "lr1e-5", "lr1e-6", "size64", "size128", "seed3"]
    for name in names:
        shutil.copytree(runs / "stock", tmp_path / name)
    given = [*(str(tmp_path / name) for name in names), f"mine={tmp_path / 'stock-seed0'}"]
    read = [read_run(one) for one in given]
    assert [run.label for run in read] == ["stock", "stock", "preset", *names[3:], "mine"]
    assert [run.seed for run in read[:3]] == [0, 1, 0]


def test_runs_of_the_asynchronous_trainer_are_told(tmp_path, write_log, said):
    """It logs replay's share of dead groups, and none of its own."""
    path = write_log({"reward": 0.1, "replay/dead_fraction": 0.5, "replay/size": 4.0}, 8)
    said("report", path)
    assert "8 logged steps" in (tmp_path / "report.html").read_text()
    said("report", f"a={path}", f"b={path}", "--out", tmp_path / "two.html")
    assert cells((tmp_path / "two.html").read_text())[0][6:] == ["50.0%", "50.0%"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["STOCK", "REPLAY", "--completions", "0"], "--completions=0 can't be used: give a number of at least 1"),
        (["STOCK", "REPLAY", "--level", "nan"], "--level=nan can't be used: give a finite number"),
        (["STOCK", "REPLAY", "--reward", "style"], "has no reward 'style'. It has: reward, scripted. Name one"),
        (["STOCK", "--completions", "8"], "--completions is for several runs"),
        (["label=STOCK"], "a label is for several runs"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(runs, given, words, said):
    folders = [word.replace("STOCK", str(runs / "stock")).replace("REPLAY", str(runs / "replay")) for word in given]
    assert words in said("report", *folders, fails=True)
