"""What a log says of its run: cases of others, right or silent; sick ones told first."""

import json

import pandas
import pytest
from advised import logged, outcome_of, rules_in, said_of, told_of

from trl_replay.extras.outcome.outcome import cost_in_words, cost_of
from trl_replay.extras.outcome.rules import advise
from trl_replay.extras.outcome.run import Run


@pytest.mark.parametrize("norm", [0.0, float("nan")])
@pytest.mark.parametrize("dead", [0.0, 0.5])
def test_live_groups_without_a_gradient_are_told_first_and_alone(norm, dead):
    assert told_of(logged(grad_norm=norm, frac_reward_zero_std=dead)) == ["no gradient"]


@pytest.mark.parametrize("reward", [0.0, 0.0156])
def test_completions_that_are_nearly_all_cut_off_are_told_first_and_alone(reward):
    log = logged(reward=reward, frac_reward_zero_std=0.875 if reward else 1.0, completions__clipped_ratio=0.97)
    assert told_of(log) == ["cut off"]


def test_completions_that_all_end_at_the_limit_are_told_where_rewards_teach_little():
    cut = {"completions__clipped_ratio": 1.0, "rewards__accuracy__std": 0.1}
    assert told_of(logged(frac_reward_zero_std=0.997, reward=0.88, **cut)) == ["cut off"], "all get the same"
    flat = logged(reward=lambda step: 0.55 - step / 400, frac_reward_zero_std=0.1, **cut)
    assert told_of(flat) == ["cut off"], "the reward did not rise"
    rising = logged(reward=lambda step: 0.2 + step / 80, frac_reward_zero_std=0.1, **cut)
    assert "cut off" not in told_of(rising), "it learns with what it writes before the limit"


def windowed(dead, norm):
    """A log of every tenth update, whose grad_norm is the last one's."""
    log = logged(40, frac_reward_zero_std=dead, grad_norm=norm, reward=lambda step: 0.4 + step / 100)
    return [{**entry, "step": 10 * entry["step"]} for entry in log]


def test_a_gradient_of_0_may_be_of_a_dead_group_where_not_every_update_was_logged():
    """With a group an update, as many updates have no gradient as groups are dead."""
    assert "no gradient" not in told_of(windowed(0.9, 0.0))
    assert told_of(windowed(0.3, 0.0)) == ["no gradient"], "0.3 ** 10: not all of them were dead"
    assert told_of(windowed(0.9, float("nan"))) == ["no gradient"]
    sliced = [{**entry, "step": 4 * entry["step"]} for entry in logged(frac_reward_zero_std=0.9, grad_norm=0.0)]
    further = [{"step": entry["step"] + slice_, "loss": 0.0} for entry in sliced for slice_ in (1, 2, 3)]
    log = sorted([*sliced, *further], key=lambda entry: entry["step"])
    assert "no gradient" not in told_of(log), "a batch in slices, of which one may be dead"


def test_a_reward_below_zero_that_fell_is_told_first():
    fallen = logged(60, reward=lambda step: 0.5 - abs(step - 25) / 20, frac_reward_zero_std=0.6)
    assert told_of(fallen)[0] == "fallen reward"
    noisy = logged(reward=lambda step: -0.5 + 0.3 * (-1) ** step, frac_reward_zero_std=0.6)
    assert "fallen reward" not in told_of(noisy)
    rising = logged(reward=lambda step: step / 20 - 1, frac_reward_zero_std=0.6)
    assert "fallen reward" not in told_of(rising)


def evaluated(log, *values):
    """The log with evaluations in equal distances."""
    every = len(log) // len(values)
    at = {every * (number + 1): value for number, value in enumerate(values)}
    found = []
    for entry in log:
        found.append(entry)
        if entry["step"] in at:
            found.append({"step": entry["step"], "eval_reward": at[entry["step"]], "eval_loss": 0.0})
    return found


def test_an_evaluation_that_falls_while_the_reward_rises_is_told_first_and_alone():
    rising = logged(reward=lambda step: 0.2 + step / 100)
    assert told_of(evaluated(rising, 0.3, 0.5, 0.4, 0.35)) == ["evaluation falls"]
    assert told_of(evaluated(rising, 0.5, 0.3)) == ["evaluation falls"]
    assert "evaluation falls" not in told_of(evaluated(rising, 0.3, 0.4, 0.5, 0.48)), "it wavers"
    falling = logged(reward=lambda step: 0.6 - step / 200)
    assert "evaluation falls" not in told_of(evaluated(falling, 0.5, 0.4, 0.3, 0.2)), "the reward falls, too"


@pytest.mark.parametrize(
    ("dead", "updates", "words", "not_words"),
    [
        (0.1, 1, "leave replay out. To save completions, take two updates", 'replay_preset="sample_efficient"'),
        (0.45, 1, "Set GRPOConfig(num_iterations=2).", 'replay_preset="sample_efficient"'),
        (0.45, 2, "leave replay out", "Set GRPOConfig(num_iterations=2)"),
        (0.5, 1, "take the preset, which replays in a second update", "leave replay out"),
        (0.5, 2, 'Set replay_preset="sample_efficient"', "Set GRPOConfig(num_iterations=2), or"),
    ],
)
def test_two_updates_come_first_and_replay_where_half_of_the_groups_are_dead(dead, updates, words, not_words):
    log = logged(20, frac_reward_zero_std=dead)
    if updates == 2:
        again = {"loss": 0.0, "grad_norm": 0.1, "step_time": 3.0}
        log = [one for entry in log for one in ({**entry, "step": 2 * entry["step"] - 1}, again)]
        log = [{**entry, "step": step} for step, entry in enumerate(log, 1)]
    assert words in said_of(log)
    assert not_words not in said_of(log)


@pytest.mark.parametrize(
    ("dead", "reward", "rule"),
    [
        (0.1, 0.5, "few dead"),
        (0.5, 0.25, "dead groups"),
        (0.97, 0.01, "stuck"),
        (0.9, 0.3, "dead groups"),  # a fifth of the groups, at least, is all right
        (1.0, 0.0, "nothing live"),
        (1.0, 1.0, "pays anything"),
        (0.8, 0.85, "all right"),
        (0.8, -1.0, "dead groups"),
        (0.9, -1.0, "dead, right or wrong"),
    ],
)
def test_the_advice_goes_by_the_dead_share_and_the_reward(dead, reward, rule):
    assert told_of(logged(8, frac_reward_zero_std=dead, reward=reward)) == [rule]


@pytest.mark.parametrize(
    ("size", "dead", "rule"),
    [
        (None, 0.86, "stuck"),
        (8, 0.84, "dead groups"),
        (4, 0.93, "stuck"),  # 0.85 ** (4 / 8) = 0.922
        (4, 0.91, "dead groups"),
        (16, 0.73, "stuck"),  # 0.85 ** 2 = 0.7225
        (16, 0.71, "dead groups"),
        (2, 0.97, "two completions"),
    ],
)
def test_nearly_all_groups_fail_at_a_pass_rate_and_not_at_a_share(size, dead, rule):
    """At a pass rate of 8 %, 85 % are dead at 2 completions, and 51 % at 8."""
    log = logged(8, frac_reward_zero_std=dead, reward=0.001)
    told = outcome_of(log, **({} if size is None else {"num_generations": size}))
    assert rules_in(advise(told)[0].change) == {rule}


@pytest.mark.parametrize(
    ("dead", "values", "rule"),
    [
        (0.9, {"reward": 4.5, "replay/highest_fraction": 0.4}, "dead groups"),
        (0.9, {"reward": 4.5, "replay/highest_fraction": 0.0}, "stuck"),
        # of 12 groups, 11 are dead and fail, and the live one passes whole: it is no dead group that succeeds
        (11 / 12, {"replay/all_wrong_fraction": 11 / 12, "replay/all_right_fraction": 1 / 12}, "stuck"),
    ],
)
def test_dead_groups_count_as_failing_by_what_is_known_of_their_rewards(dead, values, rule):
    shares = {"frac_reward_zero_std": dead, "replay/dead_fraction": dead}
    log = [{"step": step, "loss": 0.0, "reward": 1.0, **shares, **values} for step in range(1, 13)]
    assert told_of(log, replay_dry_run=True) == [rule]


def test_a_reward_function_that_never_paid_is_named_from_trls_own_log():
    log = logged(12, rewards__format__mean=0.0, rewards__format__std=0.0)
    assert said_of(log).startswith("what to change: No completion was ever paid by 'format', so it trains nothing.")
    paid_once = [{**log[0], "rewards/format/mean": 0.1, "rewards/format/std": 0.3}, *log[1:]]
    assert "ever paid" not in said_of(paid_once)


def test_a_policy_that_became_deterministic_is_told_before_all_else_with_what_led_there():
    """Half of its prompts pass and half fail, each in every completion: nothing is left to replay for."""
    late = {"frac_reward_zero_std": lambda step: 0.3 if step < 31 else 0.96, "reward": 0.4}
    log = logged(60, entropy=lambda step: 0.8 if step < 31 else 0.01, **late)
    assert told_of(log) == ["deterministic"]
    assert "deterministic" not in told_of(logged(60, entropy=0.5, **late))
    used = {"replay/uses_mean": 900.0, "replay/replaced_fraction": 0.3, "replay/all_right_fraction": 0.2}
    used |= {"replay/all_wrong_fraction": 0.5}
    replayed = [{**entry, **used, "replay/dead_fraction": entry["frac_reward_zero_std"]} for entry in log]
    found = told_of(replayed, replay_correction="none", replay_buffer_size=4)
    assert found == ["deterministic", "no correction", "overused"]


def test_a_healthy_run_and_too_short_a_log_are_told_no_fault():
    replayed = {"replay/dead_fraction": 0.3, "replay/replaced_fraction": 0.2, "replay/dead_fraction_after": 0.05}
    log = [{**entry, **replayed} for entry in logged(reward=lambda step: 0.2 + step / 100)]
    assert said_of(log) == (
        "what to change: nothing; whether replay helped, a run without it tells (trl-replay report A B)"
    )
    assert "7 were logged, and 8 are needed, best with logging_steps=1" in said_of(log[:7])


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


def test_least_shares_of_all_wrong_and_all_right_groups_are_told_where_rewards_are_0_and_1():
    facts = outcome_of(logged(8, frac_reward_zero_std=0.7, reward=0.5)).facts
    assert (facts["all wrong"], facts["all right"]) == ("at least 20.0%", "at least 20.0%")
    assert "all wrong" not in outcome_of(logged(8, rewards__accuracy__std=0.3, reward=0.4)).facts


def timed(generating, training, updates=16, **last):
    """A log of two updates a batch."""
    log = []
    for step in range(1, updates + 1):
        of_batch = {"frac_reward_zero_std": 0.5, "reward": 0.1} if step % 2 else {}
        log.append({"step": step, "loss": 0.0, "step_time": generating if step % 2 else training, **of_batch})
    return [*log, {"step": updates, **last}] if last else log


def test_the_time_of_generation_is_told_by_updates_that_train_on_a_batch_again():
    assert outcome_of(timed(7.0, 2.0)).generation_passes == pytest.approx(2.5)
    log = timed(7.0, 2.0, train_runtime=16 * 4.5 + 16 * 0.5)
    assert outcome_of(log).generation_passes == pytest.approx(5.0 / 2.5), "half a second is in no step_time"
    assert outcome_of(log[::2]).generation_passes is None, "all generate"
    assert outcome_of(timed(2.0, 2.0)).generation_passes is None
    assert outcome_of(timed(7.0, 2.0, updates=8)).generation_passes is None, "too few"
    assert cost_of(1.0) == pytest.approx((1.5, 1 / 3))
    assert cost_of(1.2, forwards=2)[0] == pytest.approx((1.2 + 2.67) / 2.2, abs=2e-3)
    assert "takes 4.1 training passes: two updates a batch cost 1.2 times the time" in cost_in_words(4.1)


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
        ("trainer_state.json", "", "can't be read"),
        ("empty.jsonl", "", "It has no entries"),
        ("empty.csv", "", "can't be read: No columns"),
        ("broken.json", '{"log_history": [', "can't be read: Expecting value"),
        ("short.jsonl", '{"step": 1, "frac', "can't be read"),
        ("no_history.json", '{"best_metric": 1}', "it has no 'log_history'"),
        ("no_list.json", '{"log_history": 5}', "its entries are no list, but int"),
        ("null.json", "null", "its entries are no list, but NoneType"),
        ("deep.json", "[" * 100_000, "can't be read"),
        ("bytes.csv", "\udcff\udcfe", "can't be read"),
        ("out.parquet", "PAR", "can't be read"),
        ("train.log", "{'loss': 0.0, 'reward': 0.2}", "files that end in '.log' are not read"),
        ("other.csv", "Wall time,Step,Value\n1,2,0.5\n", "'frac_reward_zero_std' is missing"),
        ("old.json", '[{"step": 1, "reward": 0.1, "reward_std": 0.1, "loss": 0}]', "has no 'frac_reward_zero_std'"),
        ("table.csv", "Step,reward,reward_std\n1,0.1,0.2\n", "tables in notebooks leave it out"),
        ("dpo.json", '[{"step": 1, "rewards/chosen": 0.1, "loss": 0}]', "is no log of GRPO"),
        ("steps.jsonl", '{"epoch": 1, "frac_reward_zero_std": 0.5}', "name the column 'step'"),
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
    assert "give a number of at least 2" in said("report", tmp_path, "--num_generations", 1, fails=True)


@pytest.mark.parametrize("odd", [float("nan"), None, "x", 10**400, [], True, False])
@pytest.mark.parametrize("name", ["step", "frac_reward_zero_std", "reward", "replay/dead_fraction", "grad_norm"])
def test_a_value_that_is_no_number_costs_its_step_alone(odd, name):
    log = logged(12)
    found = outcome_of([*log, {**logged(13)[-1], name: odd}])
    assert str(found).startswith("reward 0.34 → 0.34 over ")
    assert found.facts["dead groups"] == "30.0%"


def test_two_runs_in_one_log_are_told_apart(tmp_path, said):
    first, second = logged(30, reward=0.1), logged(40, reward=0.6)
    (tmp_path / "log.json").write_text(json.dumps([*first, *second]))
    told = " ".join(said("report", tmp_path / "log.json").split())
    assert "outcome: reward 0.6 → 0.6 over 40 updates" in told
    assert "This log holds 2 runs" in told


def test_what_stood_beyond_the_checkpoint_that_a_run_was_resumed_from_is_gone(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps([*logged(30, reward=0.1), *logged(40, reward=0.6)[20:]]))
    run = Run.of_folder(tmp_path / "log.json")
    assert (run.runs, [entry["step"] for entry in run.steps]) == (1, list(range(1, 41)))
    assert run.numbers("reward") == [0.1] * 20 + [0.6] * 20


def test_what_no_number_tells_is_noted(write_log, said):
    few = " ".join(said("report", write_log({"loss": 0.0, "frac_reward_zero_std": 0.1, "reward": 0.1}, 8)).split())
    assert "If you set scale_rewards='batch'" in few
    many = {"loss": 0.0, "frac_reward_zero_std": 0.7, "reward": 0.1}
    assert "assumes 8 completions" in " ".join(said("report", write_log(many, 8)).split())
    assert "assumes 8 completions" not in " ".join(said("report", write_log(many, 8), "--num_generations", 8).split())
    replayed = {"loss": 0.0, "replay/dead_fraction": 0.5, "reward": 0.1}
    assert "The settings are not known" in " ".join(said("report", write_log(replayed, 8)).split())


def test_a_reward_that_was_not_logged_is_refused_with_those_that_were(write_log, said):
    path = write_log(logged(1)[0], 8)
    assert "has no reward 'style'. It has: reward, accuracy." in said("report", path, "--reward", "style", fails=True)
    assert "accuracy 0.34 → 0.34" in said("report", path, "--reward", "accuracy")


@pytest.mark.parametrize("missing", ["reward", "epoch", "grad_norm", "step_time", "num_tokens", "entropy"])
def test_a_log_that_lacks_a_metric_is_told_the_rest(missing, write_log, said):
    (entry,) = logged(1)
    said("report", write_log({name: value for name, value in entry.items() if name != missing}, 12))
