"""`trl-replay estimate` on logs in the forms in which people have and post them: right, or silent.

Made here after public ones: a trainer's state, what a notebook or a job printed (numbers, or texts since transformers
5), ms-swift's file, and W&B's table.
"""

import json

import pytest

from trl_replay import ReplayError
from trl_replay.cli import main
from trl_replay.extras.report.estimate import estimate
from trl_replay.extras.report.log import read_log

STEPS = 40


def logged(step, dead, reward, entropy):
    """What TRL logs of a step with one function that pays 0 or 1, to 64 completions."""
    deviation = (reward * (1 - reward) * 64 / 63) ** 0.5
    return {
        "loss": 0.0, "grad_norm": 0.1, "learning_rate": 1e-6, "num_tokens": 9000.0 * step,
        "completions/mean_length": 90.5, "completions/clipped_ratio": 0.1, "rewards/accuracy/mean": reward,
        "rewards/accuracy/std": deviation, "reward": reward, "reward_std": deviation / 2, "frac_reward_zero_std": dead,
        "entropy": entropy, "kl": 0.001, "epoch": step / 100,
    }  # fmt: skip


def healthy(step):
    """Accuracy rises from 0.2 to 0.7; one group in eight is dead."""
    return logged(step, 0.125, 0.2 + step / 80, 0.4)


def dead(step):
    """One group of 32 has a success at times, the others fail."""
    return logged(step, 1 - (step % 4 == 0) / 32, (step % 4 == 0) / 256, 0.4)


def collapsed(step):
    """It learns up to step 20, and then fails everywhere with one answer."""
    return logged(step, 0.25, step / 40, 0.4) if step <= 20 else logged(step, 1.0, 0.0, 0.01)


def state(entries):
    history = [{**entry, "step": step} for step, entry in enumerate(entries, 1)]
    history += [{"step": STEPS, "eval_loss": 0.0, "eval_reward": 0.5}, {"step": STEPS, "train_runtime": 10.0}]
    return "trainer_state.json", json.dumps({"best_metric": None, "global_step": STEPS, "log_history": history})


def printed(entries):
    """Of a job, between bars and messages."""
    lines = [f"{entry}\n {step}%|##  | {step}/{STEPS} [00:10<01:00, 1.0s/it]" for step, entry in enumerate(entries, 1)]
    return "slurm-123.out", "\n".join(["Loading {weights}", *lines, "{'train_runtime': 10.0, 'train_loss': 0.0}"])


def printed_as_texts(entries):
    """Of transformers 5: texts of four digits, and values that are none."""
    texts = [{name: f"{value:.4g}" for name, value in entry.items()} for entry in entries]
    lines = [f"[STEP {step}] r=0.1\n{text}"[:-1] + ", 'clip': nan}" for step, text in enumerate(texts, 1)]
    return "train.log", "\n".join(lines)


def swift(entries):
    own = {"memory(GiB)": 60.0, "percentage": "1%", "elapsed_time": "1m 2s"}
    rows = [{**entry, **own, "global_step/max_steps": f"{step}/500"} for step, entry in enumerate(entries, 1)]
    return "logging.jsonl", "\n".join(map(json.dumps, rows))


def table(entries):
    """W&B's, with an evaluation in a row of its own."""
    names = [f"train/{name}" for name in entries[0]]
    rows = [[step, step, *entry.values(), ""] for step, entry in enumerate(entries, 1)]
    rows.append([STEPS + 1, STEPS, *[""] * len(names), 0.5])
    lines = [["_step", "train/global_step", *names, "eval/reward"], *rows]
    return "wandb_export.csv", "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


FORMS = [state, printed, printed_as_texts, swift, table]
RUNS = {
    "healthy": (healthy, "Few groups are dead, so there is little to replace: leave replay out.", 0.125),
    "dead": (dead, "Nearly all groups fail, but some were live.", 1 - 1 / 128),
    "collapsed": (collapsed, "The policy has collapsed", 0.625),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_log_is_told_what_its_run_shows(form, run, tmp_path, capsys):
    entry, words, share = RUNS[run]
    name, text = form([entry(step) for step in range(1, STEPS + 1)])
    path = tmp_path / name
    path.write_text(text)
    found = estimate(path)
    assert found.dead == pytest.approx(share, abs=1e-4)
    assert [advice.change[: len(words)] for advice in found.advice] == [words]
    assert main(["estimate", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    ends = {"healthy": "reward 0.23 → 0.68", "dead": "reward 0.00098 → 0.00098", "collapsed": "reward 0.062 → 0"}
    unit = "logged steps" if form in (printed, printed_as_texts) else "updates"
    assert f"outcome: {ends[run]} over 40 {unit} (" in told


def test_what_was_printed_has_steps_where_it_names_them(tmp_path):
    """ms-swift's, of which two are logged every ten."""
    lines = [{**healthy(step), "global_step/max_steps": f"{10 * step}/500"} for step in (1, 2)]
    (tmp_path / "nohup.out").write_text("\n".join(map(str, lines)))
    assert [entry["step"] for entry in read_log(tmp_path / "nohup.out")] == [10, 20]


def test_runs_are_not_compared_by_steps_that_were_counted(tmp_path, capsys):
    name, text = printed([healthy(step) for step in range(1, STEPS + 1)])
    (tmp_path / name).write_text(text)
    assert main(["report", f"a={tmp_path / name}", f"b={tmp_path / name}"]) == 1
    assert "names no steps, by which runs are compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Traceback (most recent call last):\nKeyError: {'a': 1}\n", "holds no log of a trainer"),
        ("{'loss': 0.0, 'reward': 0.2, 'reward_std': 0.0, 'kl': 0.0}", "older releases of TRL did not log it"),
        ("nothing of the kind", "was never logged"),
    ],
)
def test_what_tells_no_share_of_dead_groups_is_refused_in_words(text, words, tmp_path):
    (tmp_path / "train.log").write_text(text)
    with pytest.raises(ReplayError, match=words):
        estimate(tmp_path / "train.log")
