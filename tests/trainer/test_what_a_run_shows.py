"""What a run shows of its own accord: ten metrics, a line at its beginning and one at its end, and what it is."""

import json

import pytest
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay.testing import make_trainer

RIGHT = [1.0] * 4
SCRIPT = ([LIVE, HALF, DEAD], [RIGHT, DEAD, LIVE], [DEAD, RIGHT, DEAD])
TEN = {
    "replay/size", "replay/rollouts", "replay/dead_fraction", "replay/dead_fraction_after", "replay/replaced_fraction",
    "replay/age_mean", "replay/ratio_mean", "replay/ess", "replay/all_wrong_fraction", "replay/all_right_fraction",
}  # fmt: skip


def keys_of(trainer):
    return {key for entry in trainer.state.log_history for key in entry if key.startswith("replay/")}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_run_with_the_defaults_logs_ten_metrics(tmp_path, every, strategy):
    run = train(tmp_path, *SCRIPT, max_steps=6, logging_steps=every, logging_strategy=strategy, replay_start=0)
    assert keys_of(run.trainer) - {"replay/lowest_fraction", "replay/highest_fraction"} == TEN
    assert {"replay/seconds", "replay/stored", "replay/drift_mean"} <= run.session.metrics.keys()


def test_metrics_of_a_setting_in_use_are_logged(tmp_path):
    settings = {"replay_max_bytes": "1MB", "replay_correction": "topr", "replay_max_uses": 9, "replay_dry_run": False}
    run = train(tmp_path, *SCRIPT, max_steps=6, replay_start=0, **settings)
    assert {"replay/bytes", "replay/drift_mean", "replay/uses_mean"} <= keys_of(run.trainer)


def test_a_run_begins_and_ends_with_a_line_and_tells_what_it_is(tmp_path, capsys):
    rows = [{"prompt": "1=", "completion": str(number), "reward": float(number == 1)} for number in range(4)]
    (tmp_path / "teacher.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3, num_iterations=2, beta=0.1)
    session = trl_replay.attach(
        trainer, replay_preset="sample_efficient", replay_warm_start=str(tmp_path / "teacher.jsonl")
    )
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replay")]
    assert lines[0] == "replay: sample_efficient, buffer 64 groups, 1 group in it"
    count = session.totals.counters
    what = f"{len(session.buffer)} of 64 groups, {count['replaced']:.0f} of {count['groups']:.0f} replaced"
    assert lines[-1].startswith(f"replay: {what}")
    assert lines[-1].endswith("; session.explain() tells more")
    assert len(lines) == 2
    assert repr(session).startswith(f"<Session: {what}")
