"""What a run shows of its own accord: ten metrics, a line at its beginning and one at its end, and what it is."""

import json

import pytest
from advised import outcome_of, told_of, with_settings
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import ReplayConfig, reporting
from trl_replay.data.counters import NOT_LOGGED_AT_0, log
from trl_replay.extras.outcome.rules import RULES, facts_of
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


def test_losses_and_refusals_are_logged_where_they_are_not_0_over_all_batches_of_an_entry(tmp_path):
    """One batch of three has rows that nobody scored."""
    unscored = [None] * 4
    rewards = Rewards([LIVE, HALF, DEAD], [unscored, LIVE, DEAD], [LIVE, HALF, DEAD], [LIVE, HALF, DEAD])
    trainer = make_trainer(tmp_path, rewards, max_steps=6, logging_steps=3)
    trl_replay.attach(trainer)
    trainer.train()
    counted = [entry.get("replay/failed_rows") for entry in trainer.state.log_history if "replay/size" in entry]
    assert counted == [4.0, 4.0] or counted == [4.0, None]


def test_a_run_begins_and_ends_with_a_line_and_tells_what_it_is(tmp_path, capsys):
    rows = [{"prompt": "1=", "completion": str(number), "reward": float(number == 1)} for number in range(4)]
    (tmp_path / "teacher.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=3, num_iterations=2, beta=0.1)
    session = trl_replay.attach(
        trainer, replay_preset="sample_efficient", replay_warm_start=str(tmp_path / "teacher.jsonl")
    )
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replay")]
    assert lines[0] == "replay: sample_efficient, buffer 64 groups, 1 group from teacher.jsonl"
    count = session.totals.counters
    what = f"{len(session.buffer)} of 64 groups, {count['replaced']:.0f} of {count['groups']:.0f} replaced"
    assert lines[-1].startswith(f"replay: {what}")
    assert lines[-1].endswith("; session.explain() tells more")
    assert len(lines) == 2
    assert repr(session).startswith(f"<Session: {what}")


def test_a_further_update_logs_the_share_of_its_groups_that_were_drawn_anew(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=8, num_iterations=2)
    session = trl_replay.attach(trainer, replay_iterations="replay", replay_start=0)
    trainer.train()
    shares = [entry.get("replay/redrawn_fraction") for entry in trainer.state.log_history if "loss" in entry]
    assert shares[::2] == [None] * 4
    assert sum(share for share in shares[1::2] if share) * 3 == pytest.approx(session.totals.counters["iterated"])
    assert "drawn anew in further updates" in outcome_of(trainer.state.log_history).facts


def by_default(metrics, **settings):
    """Of all metrics of a batch, those that a log has with these settings."""
    config = ReplayConfig(**settings)
    return {
        key: value
        for key, value in reporting.logged_of(metrics, config, True).items()
        if value or not key.startswith(NOT_LOGGED_AT_0)
    }


QUIET = {
    "replay/size": 64.0, "replay/stored": 1.0, "replay/evicted": 1.0, "replay/refused": 0.0, "replay/retired": 0.0,
    "replay/dead_fraction": 0.4, "replay/dead_fraction_after": 0.05, "replay/replaced_fraction": 0.3,
    "replay/all_wrong_fraction": 0.3, "replay/all_right_fraction": 0.1, "replay/lowest_fraction": 0.3,
    "replay/highest_fraction": 0.1, "replay/untrained_fraction": 0.0, "replay/failed_rows": 0.0, "replay/lost": 0.0,
    "replay/age_mean": 3.0, "replay/uses_mean": 2.0, "replay/ratio_mean": 1.0, "replay/ess": 0.9,
    "replay/drift_mean": 0.1, "replay/gated_fraction": 0.0,
}  # fmt: skip
"""All metrics of a batch of a healthy run."""
LATE = 31
"""The step from which on a run is sick."""
DRY = {"replay_dry_run": True}
SICK = {
    "no gradient": ({"grad_norm": 0.0}, {}),
    "cut off": ({"completions/clipped_ratio": 0.97, "reward": 0.01, "replay/dead_fraction": 0.9,
                 "replay/all_right_fraction": 0.0}, {}),
    "evaluation falls": ({}, {}),
    "collapse": ({"replay/dead_fraction": 1.0, "replay/all_wrong_fraction": 1.0, "replay/all_right_fraction": 0.0,
                  "entropy": 0.01}, {}),
    "deterministic": ({"replay/dead_fraction": 1.0, "replay/all_wrong_fraction": 0.6, "entropy": 0.01,
                       "replay/all_right_fraction": 0.4}, {}),
    "two completions": ({"replay/dead_fraction": 0.6}, {"num_generations": 2}),
    "fallen reward": ({"reward": 0.1}, {}),
    "nothing live": ({"replay/dead_fraction": 1.0, "replay/size": 0.0, "replay/all_wrong_fraction": 1.0,
                      "replay/all_right_fraction": 0.0}, {}),
    "truncation": ({"replay/untrained_fraction": 0.2, "completions/clipped_ratio": 0.5}, {}),
    "no reward": ({"replay/failed_rows": 32.0}, {}),
    "all right": ({"replay/all_right_fraction": 0.7, "replay/dead_fraction": 0.8}, {}),
    "dead function": ({"replay/dead_fraction": 0.0, "replay/dead_fraction/right": 0.8,
                       "replay/live_without/right": 0.7,
                       "rewards/right/mean": 0.1, "rewards/long/mean": 0.3, "replay/dead_fraction/long": 0.0}, {}),
    "silent function": ({"replay/dead_fraction/right": 1.0, "rewards/right/mean": 0.0, "rewards/long/mean": 0.3,
                         "replay/dead_fraction/long": 0.0}, {}),
    "few dead": ({"replay/dead_fraction": 0.1}, DRY),
    "stuck": ({"replay/dead_fraction": 0.95, "replay/all_wrong_fraction": 0.95, "replay/all_right_fraction": 0.0},
              DRY),
    "dead groups": ({"replay/dead_fraction": 0.6}, DRY),
    "small buffer": ({"replay/size": 8.0, "replay/dead_fraction_after": 0.2}, {"replay_buffer_size": 8}),
    "dead groups stay": ({"replay/dead_fraction_after": 0.4}, {}),
    "no correction": ({}, {"replay_correction": "none"}),
    "overused": ({"replay/uses_mean": 400.0}, {}),
    "stale buffer": ({"replay/ess": 0.2, "reward": 0.3}, {}),
    "pays anything": ({"replay/all_right_fraction": 1.0, "replay/dead_fraction": 1.0, "reward": 1.0}, {}),
    "narrow clip": ({"replay/clip_ratio": 0.9, "replay/sequence_drift_mean": 0.02}, {}),
    "masked rows": ({"replay/gated_fraction": 0.8}, {"replay_correction": "sequence_mask"}),
}  # fmt: skip
"""By rule: what a sick run logs, late in it, and its settings."""
OF_STOCK = {"steps without a reward", "sum alone", "dead, right or wrong"}
"""Rules for logs that replay has not counted."""


def a_log(values, settings, sick_from):
    entries = []
    known = {name: value for name, value in settings.items() if name.startswith("replay_")}
    for step in range(1, 61):
        late = values if step >= sick_from else {}
        metrics = {**QUIET, **{name: value for name, value in late.items() if name.startswith("replay/")}}
        trls = {name: value for name, value in late.items() if not name.startswith("replay/")}
        entry = {"step": step, "loss": 0.0, "grad_norm": 0.2, "reward": 0.3 + step / 600, "reward_std": 0.3,
                 "entropy": 0.4, "completions/clipped_ratio": 0.1, "completions/max_length": 256.0,
                 "replay/rollouts": 64.0 * step}  # fmt: skip
        entries.append({**entry, **trls, **by_default(metrics, **known)})
    return entries


@pytest.mark.parametrize("rule", [rule.name for rule in RULES if rule.name not in OF_STOCK])
def test_every_rule_applies_to_what_is_logged_by_default(rule):
    values, settings = SICK[rule]
    log = list(a_log(values, settings, 1 if rule in ("stale buffer", "pays anything") else LATE))
    if rule == "evaluation falls":
        log += [{"step": 20 * at, "eval_reward": value} for at, value in ((1, 0.5), (2, 0.3), (3, 0.25))]
    size = {name: value for name, value in settings.items() if name == "num_generations"}
    config = ReplayConfig(**{name: value for name, value in settings.items() if name not in size})
    outcome = outcome_of(log, **{**config.to_dict(), **size})
    facts = facts_of(outcome)
    assert rule in {one.name for one in RULES if one.applies(facts)}
    assert rule not in told_of(a_log({}, {}, LATE)), "a healthy run is not told so"


def test_every_fact_that_a_rule_names_is_one_or_a_setting():
    known = {"entropy of its highest", "groups once at the lowest", "reward", "dead groups of NAME's", "NAME"}
    for values, settings in SICK.values():
        names = {name: value for name, value in settings.items() if name.startswith("replay_")}
        known |= facts_of(with_settings(a_log(values, settings, LATE), **names)).keys()
    for rule in RULES:
        for condition in (*rule.when, *rule.options.values()):
            for part in condition.split(" | "):
                assert any(part.startswith(f"{name} ") for name in known | {"num_generations"}), part


def test_states_and_counts_of_an_entry_are_as_they_were():
    averaged = {"replay/size": [], "replay/failed_rows": []}
    for size, failed in ((1.0, 2.0), (3.0, 4.0)):
        log({"replay/size": size, "replay/failed_rows": failed}, averaged)
    assert averaged == {"replay/size": [3.0], "replay/failed_rows": [6.0]}
