"""What a log says of its run: its outcome, what was spent, and the forms in which logs are read."""

import json

import pandas
import pytest
from advised import logged, outcome_of

from trl_replay.extras.outcome.outcome import cost_in_words
from trl_replay.extras.outcome.run import Run


def test_the_outcome_tells_completions_updates_and_time_and_the_groups_of_further_updates():
    log = []
    shares = {"replay/dead_fraction": 0.5, "replay/dead_fraction_after": 0.1, "replay/replaced_fraction": 0.25}
    for step in range(1, 41):
        if step % 2:
            log.append({**logged(1, frac_reward_zero_std=0.5)[0], **shares, "replay/rollouts": 32.0 * (step + 1)})
        else:
            log.append({"loss": 0.0, "replay/redrawn_fraction": 0.75, "step_time": 3.0})
        log[-1]["step"] = step
    found = outcome_of(log)
    assert str(found).startswith("reward 0.34 → 0.34 over 1,280 completions, 40 updates, 260 seconds (means of the")
    assert found.facts == {
        "completions": "1,280",
        "updates": "40",
        "seconds": "260",
        "updates a batch": "2",
        "dead groups": "50.0%",
        "replaced": "25.0%",
        "dead groups trained on": "10.0%",
        "drawn anew in further updates": "75.0%",
    }


def test_least_shares_of_all_wrong_and_all_right_groups_are_told_where_rewards_are_0_and_1_and_they_are_not_0():
    facts = outcome_of(logged(8, frac_reward_zero_std=0.7, reward=0.5)).facts
    assert (facts["all wrong"], facts["all right"]) == ("at least 20.0%", "at least 20.0%")
    assert "all wrong" not in outcome_of(logged(8, rewards__accuracy__std=0.3, reward=0.4)).facts
    assert "all right" not in outcome_of(logged(8, frac_reward_zero_std=0.3, reward=0.5)).facts


@pytest.mark.parametrize(
    ("seconds", "values", "words"),
    [
        # generation as long as a pass of training over the batch, and a third of one for old log-probs
        (7 / 3, {}, "takes 1 training passes: two updates a batch cost 1.67 times the time, and pay if they save 40%"),
        (8 / 3, {"kl": 0.01}, "takes 1 training passes: two updates a batch cost 1.57 times the time"),
    ],
)
def test_the_time_of_generation_is_told_by_updates_that_train_on_a_batch_again(seconds, values, words):
    log = []
    for step in range(1, 17):
        of_batch = {"frac_reward_zero_std": 0.5, "reward": 0.1} if step % 2 else {}
        log.append({"step": step, "loss": 0.0, "step_time": seconds if step % 2 else 1.0, **values, **of_batch})
    (told,) = cost_in_words(Run.of_log(log))
    assert words in told
    assert "(with the preset: " in told
    assert cost_in_words(Run.of_log(log[::2])) == [], "all generate"
    assert cost_in_words(Run.of_log(log[:8])) == [], "too few"


def test_the_last_of_several_runs_in_a_log_counts_and_what_stood_beyond_a_resume_is_gone(tmp_path):
    first, second = logged(12, reward=0.1), logged(20, reward=0.5)
    (tmp_path / "log.json").write_text(json.dumps([*first, *second[:15], *second[10:]]))
    assert [entry["reward"] for entry in Run.of_folder(tmp_path / "log.json").steps] == [0.5] * 20


MISSING = "has no column 'step' with 'frac_reward_zero_std'"
FORMS = {
    "state.json": lambda entries: json.dumps({"best_metric": None, "log_history": entries}),
    "log.json": json.dumps,
    "log.jsonl": lambda entries: "\n".join(map(json.dumps, entries)),
    "swift.jsonl": lambda entries: "\n".join(
        json.dumps({**entry, "step": None, "global_step/max_steps": f"{entry['step']}/500", "elapsed_time": "1m"})
        for entry in entries
    ),
    "printed.json": lambda entries: json.dumps([{key: f"{entry[key]:g}" for key in entry} for entry in entries]),
    "wandb.csv": lambda entries: (
        "\ufeff"
        + pandas.DataFrame(
            [
                {"train/global_step": entry["step"], **{f"train/{name}": entry[name] for name in entry}}
                for entry in entries
            ]
        ).to_csv(index=False)
    ),
}


@pytest.mark.parametrize("form", [*FORMS, "log.parquet"])
def test_each_form_of_a_log_is_told_what_its_run_shows(form, tmp_path, said):
    entries = logged(reward=lambda step: 0.2 + step / 80, frac_reward_zero_std=0.125)
    entries += [{"step": 40, "eval_reward": 0.6}, {"step": 40, "train_runtime": 500.0}]
    if form in FORMS:
        (tmp_path / form).write_text(FORMS[form](entries))
    else:
        pandas.DataFrame(entries).to_parquet(tmp_path / form)
    run = Run.of_folder(tmp_path / form)
    assert (len(run.trained), run.updates_per_batch) == (40, 1), "what a table leaves empty is no update"
    told = " ".join(said("report", tmp_path / form).split())
    assert "outcome: reward 0.23 → 0.68 over 40 updates, 400 seconds (" in told
    assert "what to change: Fewer than half of the groups are dead" in told


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.json", "", "can't be read: Expecting value"),
        ("empty.jsonl", "", "It has no entries"),
        ("empty.csv", "", "can't be read: No columns"),
        ("short.jsonl", '{"step": 1, "frac', "can't be read"),
        ("no_history.json", '{"best_metric": 1}', "it has no 'log_history'"),
        ("no_list.json", '{"log_history": 5}', "its entries are no list, but int"),
        ("deep.json", "[" * 100_000, "can't be read"),
        ("bytes.csv", "\udcff\udcfe", "can't be read"),
        ("out.parquet", "PAR", "can't be read"),
        ("train.log", "{'loss': 0.0, 'reward': 0.2}", "files that end in '.log' are not read"),
        ("table.csv", "Step,reward,reward_std\n1,0.1,0.2\n", "notebooks' tables leave it out"),
        ("dpo.json", '[{"step": 1, "rewards/chosen": 0.1, "loss": 0}]', "It has step, rewards/chosen, loss."),
        (
            "steps.jsonl",
            '{"epoch": 1, "frac_reward_zero_std": 0.5}',
            "has no column 'step' with 'frac_reward_zero_std'",
        ),
    ],
)
def test_an_odd_log_is_an_error_that_names_the_file_what_is_wrong_and_what_is_read(name, text, words, tmp_path, said):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    told = " ".join(said("report", tmp_path / name, fails=True).split())
    assert told.startswith(f"trl-replay: {tmp_path / name} ")
    assert words in told
    assert "Give a run's output_dir, one of its checkpoints, or trainer_state.json; or a table" in told


def test_a_folder_without_a_log_and_one_that_is_not_there_are_refused(tmp_path, said):
    assert "neither trainer_state.json nor a complete checkpoint" in said("report", tmp_path, fails=True)
    assert "does not exist" in said("report", tmp_path / "none", fails=True)


@pytest.mark.parametrize("odd", [float("nan"), None, "x", 10**400, [], True, False])
@pytest.mark.parametrize("name", ["step", "frac_reward_zero_std", "reward", "replay/dead_fraction", "grad_norm"])
def test_a_value_that_is_no_number_costs_its_step_alone(odd, name):
    log = logged(12)
    found = outcome_of([*log, {**logged(13)[-1], name: odd}])
    assert str(found).startswith("reward 0.34 → 0.34 over ")
    assert found.facts["dead groups"] == "30.0%"


def test_a_reward_that_was_not_logged_is_refused_with_those_that_were(write_log, said):
    path = write_log(logged(1)[0], 8)
    assert "has no reward 'style'. It has: reward, accuracy." in said("report", path, "--reward", "style", fails=True)
    assert "accuracy 0.34 → 0.34" in said("report", path, "--reward", "accuracy")


@pytest.mark.parametrize("missing", ["reward", "epoch", "grad_norm", "step_time", "num_tokens", "entropy"])
def test_a_log_that_lacks_a_metric_is_told_the_rest(missing, write_log, said):
    (entry,) = logged(1)
    said("report", write_log({name: value for name, value in entry.items() if name != missing}, 12))
