"""`trl-replay report` judges by the reward that counts: of real runs, and of logs by hand."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import DEAD, HALF, LIVE, Rewards
from trl_replay.extras.report.comparison import comparison, verdict
from trl_replay.extras.report.page import write_report
from trl_replay.extras.report.runs import read_run, seed_of
from trl_replay.extras.report.verdict import difference

import trl_replay
from trl_replay import ReplayError
from trl_replay.cli import main
from trl_replay.testing import make_trainer

STEPS = 40


def written(folder: Path, accuracy: Sequence[float], length: Sequence[float], **more: Any) -> Path:
    """The state of a run of two functions, whose sum is never equal over a group."""
    log = [
        {"step": step, "frac_reward_zero_std": 0.0, "reward": right + short,
         "rewards/accuracy/mean": right, "rewards/length/mean": short, **more}
        for step, (right, short) in enumerate(zip(accuracy, length, strict=True), 1)
    ]  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


def rising(end: float, by: int = STEPS) -> list[float]:
    """From 0 to a value, reached in the step `by`."""
    return [min(step / by, 1.0) * end for step in range(1, STEPS + 1)]


REPLAYED = {"replay/dead_fraction": 0.7, "replay/dead_fraction_after": 0.0, "replay/replaced_fraction": 0.7}


@pytest.fixture
def logs(tmp_path: Path) -> list[str]:
    """Stock learns length alone, replay accuracy: the sum says that stock is the better one."""
    written(tmp_path / "stock", [0.0] * STEPS, rising(0.5))
    written(tmp_path / "replay", rising(0.4), [0.0] * STEPS, **REPLAYED)
    return [str(tmp_path / name) for name in ("stock", "replay")]


def plain(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def cells(page: str) -> list[list[str]]:
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [row for row in rows if row]


def test_a_named_function_decides_where_the_sum_says_the_opposite(logs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["report", *logs, "--reward", "accuracy", "--out", str(out)]) == 0
    text = plain(out.read_text())
    assert "By accuracy, replay ends 0.385 above stock (0.385 and 0, one run each)." in text
    assert "The lower one did not rise" in text
    assert "Accuracy over updates" in text
    (stock, replay) = cells(out.read_text())
    assert (stock[5], replay[5]) == ("0", "0.385")
    assert (stock[6:], replay[6:]) == (["–", "–"], ["70.0%", "0.0%"])
    assert "TRL counts dead groups by the sum of the rewards alone: by accuracy, a run with replay" in text


def test_the_sum_decides_nothing_where_several_functions_were_logged_and_none_is_named(logs: list[str]) -> None:
    (told,) = verdict([read_run(given) for given in logs])
    assert "nothing says which one counts" in told
    assert "by accuracy, stock 0, replay 0.385" in told
    assert told.endswith("--reward accuracy.")
    assert "By the sum of the rewards, stock ends" in verdict([read_run(given) for given in logs], "reward")[0]


def test_a_function_that_a_run_did_not_log_is_refused_with_those_that_it_logged(logs: list[str], capsys: Any) -> None:
    assert main(["report", *logs, "--reward", "style"]) == 1
    assert "has no reward 'style'. It has: reward, accuracy, length." in capsys.readouterr().err


def accuracy(completions: list[str], **_: Any) -> list[float]:
    return accuracy.script(completions)  # type: ignore[attr-defined, no-any-return]


def length(completions: list[str], **_: Any) -> list[float]:
    return [row / 10 for row in range(len(completions))]


def test_runs_that_name_the_function_in_replay_reward_are_judged_by_it_without_being_asked(tmp_path: Path) -> None:
    """No checkpoint says what the settings were: the log does. The sum never ties, accuracy in two groups of three."""
    for name in ("stock", "replay"):
        accuracy.script = Rewards([LIVE, HALF, LIVE], [DEAD, DEAD, LIVE])  # type: ignore[attr-defined]
        trainer = make_trainer(tmp_path / name, [accuracy, length], max_steps=6)
        if name == "replay":
            trl_replay.attach(trainer, replay_reward="accuracy", replay_start=0)
        trainer.train()
        trainer.save_state()
    runs = [read_run(str(tmp_path / name)) for name in ("stock", "replay")]
    assert [run.counts for run in runs] == [None, "accuracy"]
    page = comparison(runs)
    assert "By accuracy, replay ends 0 above stock (0.0833 and 0.0833, one run each)." in plain(page)
    assert [row[6:] for row in cells(page)] == [["–", "–"], ["55.6%", "0.0%"]]
    alone = write_report(tmp_path / "replay").read_text()
    assert "<h2>Reward: accuracy</h2>" in alone
    assert "mean accuracy" in alone
    assert "mean length" in write_report(tmp_path / "replay", reward="length").read_text()


def test_runs_that_name_different_functions_are_not_compared_unasked(tmp_path: Path) -> None:
    names = ("accuracy", "length")
    for name in names:
        written(tmp_path / name, rising(0.4), rising(0.1), **REPLAYED, **{f"replay/judged_by/{name}": 1.0})
    runs = [read_run(str(tmp_path / name)) for name in names]
    with pytest.raises(ReplayError, match="several values of replay_reward: accuracy, length"):
        comparison(runs)
    assert "By length" in plain(comparison(runs, "length"))


def test_evaluations_decide_where_all_runs_have_them(tmp_path: Path) -> None:
    for name, end in (("stock", 0.3), ("replay", 0.2)):
        path = written(tmp_path / name, rising(0.1 if name == "stock" else 0.4), [0.0] * STEPS) / "trainer_state.json"
        state = json.loads(path.read_text())
        state["log_history"] += [{"step": 40, "eval_reward": 0.0, "eval_rewards/accuracy/mean": end}]
        path.write_text(json.dumps(state))
    runs = [read_run(str(tmp_path / name)) for name in ("stock", "replay")]
    first, second, _ = verdict(runs, "accuracy")
    assert first.startswith("On evaluation prompts: By accuracy, stock ends 0.1 above replay (0.3 and 0.2")
    assert second.startswith("On prompts of training: By accuracy, replay ends 0.289 above stock")
    assert [row[6] for row in cells(comparison(runs, "accuracy"))] == ["0.3", "0.2"]
    without = [*runs[:1], runs[1]._replace(evaluations=())]
    assert "Only stock logged evaluations" in verdict(without, "accuracy")[0]


def arms(tmp_path: Path, ends: dict[str, dict[str, float]]) -> list[str]:
    """Folders of seeds of each label, `label=folder`."""
    return [
        f"{label}={written(tmp_path / f'{label}-{seed}', rising(end), [0.0] * STEPS)}"
        for label, of_seed in ends.items()
        for seed, end in of_seed.items()
    ]


PAIRS = {"stock": {"s0": 0.1, "s1": 0.2, "s2": 0.3}, "replay": {"s2": 0.5, "s0": 0.4, "s1": 0.6}}


def test_seeds_pair_by_the_number_that_ends_their_folders_names(tmp_path: Path) -> None:
    """Gains of 0.3, 0.4, and 0.2, less what the last four steps of a line lack: 3.75 %."""
    runs = [read_run(given) for given in arms(tmp_path, PAIRS)]
    found = difference(runs[:3], runs[3:], "rewards/accuracy/mean")
    assert found.pairs == 3
    assert found.mean == pytest.approx(0.3 * 0.9625)
    assert found.error == pytest.approx(0.1 / 3**0.5 * 0.9625)
    assert found.interval == pytest.approx((0.3 * 0.9625 - 4.30 * found.error, 0.3 * 0.9625 + 4.30 * found.error))
    assert found.clear
    assert (
        "The difference is clear: 0.289 ± 0.056 (standard error; higher on 3 of 3 seeds)"
        in verdict(runs, "accuracy")[0]
    )


def test_seeds_that_do_not_pair_have_the_error_of_two_means(tmp_path: Path) -> None:
    """Welch's: both variances are 0.01, with four degrees of freedom."""
    given = arms(tmp_path, {"stock": PAIRS["stock"], "replay": {"s3": 0.4, "s4": 0.6, "s5": 0.5}})
    runs = [read_run(each)._replace(completions=8) for each in given]
    found = difference(runs[:3], runs[3:], "rewards/accuracy/mean")
    assert found.pairs == 0
    assert found.error == pytest.approx((2 * 0.01 / 3) ** 0.5 * 0.9625)
    assert found.interval[0] == pytest.approx(found.mean - 2.78 * found.error)
    assert "The difference is clear: 0.289 ± 0.079 (standard error; seeds do not pair)" in verdict(runs, "accuracy")[0]
    near = [run._replace(label="again") for run in runs[:3]]
    assert "That may be chance: 0 ± 0 (" in verdict([*runs[:3], *near], "accuracy")[0]


def test_completions_are_saved_to_the_lower_end_value(tmp_path: Path) -> None:
    """Means over four steps: stock's last is of steps 37 to 40, 0.385; replay, that rises four times as fast, has it
    between steps 11 and 12, in the mean over steps 8.125 to 11.125."""
    slow = written(tmp_path / "slow", rising(0.4), [0.0] * STEPS)
    fast = written(tmp_path / "fast", rising(0.8, by=20), [0.0] * STEPS)
    runs = [read_run(str(path), completions=8) for path in (slow, fast)]
    told = verdict(runs, "accuracy")[0]
    assert told.endswith("To the value at which slow ends (0.385), fast took 89 completions and slow 320: 72% fewer.")
    runs = [read_run(str(path)) for path in (fast, slow)]
    told = verdict(runs, "accuracy")[0]
    assert "fast took 11 updates and slow 40" in told, "in either order"
    assert "Not all logs count completions, so updates are compared" in told


def test_where_a_batch_takes_several_updates_tokens_are_compared(tmp_path: Path) -> None:
    """As with TRL's own log of stock beside the preset's, which takes two updates a batch."""
    runs = []
    for name, updates in (("stock", 1), ("preset", 2)):
        read = read_run(str(written(tmp_path / name, rising(0.4 * updates, by=STEPS // updates), [0.0] * STEPS)))
        log = [{**entry, "num_tokens": 50.0 * n, "step": updates * n} for n, entry in enumerate(read.log, start=1)]
        runs.append(read._replace(log=log))
    told = " ".join(verdict(runs, "accuracy"))
    assert "did not train for the same number" not in told
    assert "preset took 556 tokens and stock 2,000: 72% fewer." in told
    assert "so tokens are compared" in told
    (stock, preset) = cells(comparison(runs, "accuracy"))
    assert (stock[1:4], preset[1:4]) == (["–", "2,000", "40"], ["–", "556", "22"])
    assert "Accuracy over tokens" in plain(comparison(runs, "accuracy"))


def test_completions_are_saved_seed_by_seed_and_never_is_said_where_a_seed_does_not_get_there(tmp_path: Path) -> None:
    ends = {"stock": {"s0": 0.2, "s1": 0.2, "s2": 0.5}, "replay": {"s0": 0.8, "s1": 0.4, "s2": 0.4}}
    runs = [read_run(given, completions=8) for given in arms(tmp_path, ends)]
    told = verdict(runs, "accuracy")[0]
    assert "replay took 166 (89 to never) completions and stock 320: 48% fewer " in told
    assert "in the median of 3 pairs of seeds (never there to 72% fewer)" in told


def test_settings_that_trained_for_different_lengths_do_not_compare(tmp_path: Path) -> None:
    runs = [read_run(str(written(tmp_path / name, rising(0.4), [0.0] * STEPS))) for name in ("a", "b")]
    twice = [runs[0]._replace(completions=8), runs[1]._replace(completions=16)]
    assert (
        "The settings did not train for the same number of completions (a 320, b 640)" in verdict(twice, "reward")[1]
    )


@pytest.mark.parametrize(
    ("path", "seed"),
    [("out/stock-seed3", 3), ("out/s12", 12), ("out/run7/checkpoint-400", 7), ("logs/replay_2.jsonl", 2),
     ("out/run5/trainer_state.json", 5), ("stock", None)],
)  # fmt: skip
def test_a_seed_is_the_last_number_of_a_name(path: str, seed: int | None, tmp_path: Path) -> None:
    assert seed_of(tmp_path / "a" / path) == seed
