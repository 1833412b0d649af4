"""`trl-replay estimate`: what a run's log says about replay, against counts by hand."""

import json
import re
import shutil

import pytest
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import ReplayConfig, ReplayError
from trl_replay.extras.advice.rules import advise
from trl_replay.extras.report.estimate import estimate
from trl_replay.extras.report.log import read_log
from trl_replay.testing import make_trainer

RIGHT = [1.0, 1.0, 1.0, 1.0]
SCRIPT = ([LIVE, DEAD, RIGHT], [DEAD, DEAD, HALF], [DEAD, RIGHT, DEAD], [LIVE, HALF, DEAD])
"""Dead of three: 2, 2, 3, 1; all wrong 1, 2, 2, 1; all right 1, 0, 1, 0."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A stock run of four steps."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, Rewards(*SCRIPT), save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_state()
    return folder


def test_the_dead_share_is_that_of_the_log(run):
    for source in (run, run / "trainer_state.json", run / "checkpoint-4"):
        found = estimate(source)
        assert found.dead == pytest.approx(2 / 3)


def test_a_run_with_replay_is_judged_by_replays_own_shares(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT))
    trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    trainer.save_state()
    found = estimate(tmp_path / "trainer_state.json")
    assert found.dead == pytest.approx(2 / 3)
    assert found.all_wrong == pytest.approx((6 / 12, 6 / 12))
    assert found.all_right == pytest.approx((2 / 12, 2 / 12))
    assert found.had_replay


def test_a_run_that_had_replay_is_told_so(write_log, said):
    told = said("estimate", write_log({"replay/dead_fraction": 0.5}))
    assert "Replay was attached to this run already" in told


def test_trls_own_log_bounds_all_wrong_and_all_right_where_rewards_are_0_and_1(run, said):
    """Mean rewards of 5, 2, 4, and 3 twelfths, of which live groups may hold up to 4, 4, 0, and 8."""
    found = estimate(run)
    least = [1 / 12, 0, 4 / 12, 0]
    most = [5 / 12, 2 / 12, 4 / 12, 3 / 12]
    bounds = (sum(least) / 4, sum(most) / 4)
    assert found.all_right == pytest.approx(bounds)
    assert found.all_wrong == pytest.approx((2 / 3 - bounds[1], 2 / 3 - bounds[0]))
    assert bounds[0] <= 2 / 12 <= bounds[1], "what is so"
    printed = said("estimate", run)
    assert "67%" in printed
    assert "1 group in 3 " in printed
    assert "10% to 29%" in printed
    assert "as ranges" in printed.replace("\n", " ")


@pytest.mark.parametrize("deviation", [0.0, 0.3, 0.9])
def test_rewards_that_are_not_0_and_1_are_not_told_apart(write_log, said, deviation):
    grades = {"reward": 0.4, "rewards/grade/mean": 0.4, "rewards/grade/std": deviation}
    assert "not known" in said("estimate", write_log({"frac_reward_zero_std": 0.5, **grades}))


@pytest.mark.parametrize(
    ("dead", "reward", "words"),
    [
        (0.1, 0.5, "Few groups are dead, so there is little to replace: leave replay out"),
        (0.5, 0.25, "If your prompts repeat"),
        (0.97, 0.01, "Nearly all groups fail"),
        (0.9, 0.3, "If your prom"),  # a fifth of the groups, at least, is all right
        (1.0, 0.0, "No group is live"),
        (1.0, 1.0, "Most prompts are solved"),
        (0.8, 0.85, "Most prompts are solved"),
        (0.8, -1.0, "If your prompts repeat"),
        (0.9, -1.0, "Nearly all groups are dead"),
    ],
)
def test_the_advice_goes_by_the_dead_share_and_the_reward(write_log, dead, reward, words):
    of_function = {"rewards/right/mean": reward, "rewards/right/std": abs(reward * (1 - reward)) ** 0.5}
    (advice,) = estimate(write_log({"frac_reward_zero_std": dead, "reward": reward, **of_function}, 8)).advice
    assert advice.change.startswith(words)


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv"])
def test_a_file_of_metrics_is_read_where_no_checkpoint_was_saved(tmp_path, ending):
    entries = [{"train/global_step": step, "train/frac_reward_zero_std": 0.5, "other": ""} for step in range(1, 9)]
    lines = [",".join(entries[0]), *[",".join(map(str, entry.values())) for entry in entries]]
    texts = {"json": json.dumps(entries), "jsonl": "\n".join(map(json.dumps, entries)), "csv": "\n".join(lines)}
    path = tmp_path / f"log.{ending}"
    path.write_text(texts[ending])
    found = estimate(path)
    assert found.dead == 0.5
    assert [advice.change[:12] for advice in found.advice] == ["If your prom"]


def test_where_there_is_no_log_it_is_said_how_to_make_one(tmp_path):
    (tmp_path / "log.csv").write_text("loss\n1\n")
    for path in (tmp_path, tmp_path / "log.csv"):
        with pytest.raises(ReplayError, match=r"json\.dump\(trainer\.state\.log_history"):
            estimate(path)


@pytest.mark.parametrize(
    ("dead", "words"),
    [(1.0, "no group"), (14 / 15, "1 group in 15"), (0.996, "1 group in 250"), (0.25, "75% of the groups")],
)
def test_it_is_said_how_many_groups_have_a_gradient(write_log, said, dead, words):
    told = said("estimate", write_log({"frac_reward_zero_std": dead}))
    assert re.search(rf"with a gradient │ {words} ", told)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds neither trainer_state.json"),
        ("{", "holds no log of a trainer"),
        ("[]", "says nothing about dead groups"),
        ('{"log_history": [{"loss": 1.0, "step": 1}]}', "was never logged"),
        ('{"log_history": [{"frac_reward_zero_std": "x", "step": 1}]}', "was never logged"),
    ],
)
def test_what_is_no_log_of_grpo_is_refused_in_words(tmp_path, said, content, words):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    assert words in " ".join(said("estimate", tmp_path, fails=True).split())


def test_87_a_stock_run_is_told_where_its_log_cannot_count_dead_groups(tmp_path, said):
    """Two of three groups are dead, and TRL logs 0."""
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD]), scale_rewards="batch", max_steps=9, save_strategy="steps", save_steps=9
    )
    trainer.train()
    assert estimate(tmp_path).dead < 0.1
    told = " ".join(said("estimate", tmp_path).split())
    assert "If you set scale_rewards='batch'" in told
    assert "run with replay_dry_run=True, which does" in told


@pytest.mark.parametrize("odd", [float("nan"), None, "x"])
@pytest.mark.parametrize("name", ["frac_reward_zero_std", "replay/dead_fraction", "replay/all_right_fraction"])
def test_a_log_that_ends_in_values_that_are_no_numbers_is_estimated(write_log, name, odd):
    values = {"frac_reward_zero_std": 0.5, "reward": 0.1}
    entries = [{"step": step, **values} for step in range(1, 13)]
    assert estimate(write_log({**values, name: odd}, 12, entries)).dead == 0.5


def test_106_empty_cells_of_a_table_are_no_values(tmp_path, write_log, said):
    """Of a run that was paused for a step, and of one whose exact share is missing."""
    names = ["step", "frac_reward_zero_std", "reward", "replay/dead_fraction", "replay/stored", "replay/rollouts"]
    lines = [",".join(names), *(f"{step},0.5,0.25,0.5,2,{12 * step}" for step in range(1, 37))]
    lines += [f"{step},0.5,0.25,,," for step in range(37, 41)]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    assert estimate(tmp_path / "log.csv").dead == 0.5
    said("report", tmp_path / "log.csv", "--out", tmp_path / "page.html")
    assert estimate(write_log({"frac_reward_zero_std": 0.5, "replay/stored": "x", "reward": 0.1}, 40)).dead == 0.5


@pytest.mark.parametrize(
    ("dead", "values", "words"),
    [
        (0.9, {"reward": 4.5, "replay/highest_fraction": 0.4}, "If your prompts repeat"),
        (0.9, {"reward": 4.5, "replay/highest_fraction": 0.0}, "Nearly all groups fail"),
        # of 12 groups, 11 are dead and fail, and the live one passes whole: it is no dead group that succeeds
        (
            11 / 12,
            {"reward": 1.0, "replay/lowest_fraction": 11 / 12, "replay/all_right_fraction": 1 / 12},
            "Nearly all groups fail",
        ),
    ],
)
def test_dead_groups_count_as_failing_by_what_is_known_of_their_highest_and_lowest_rewards(dead, values, words):
    shares = {"frac_reward_zero_std": dead, "replay/dead_fraction": dead}
    log = [{"step": step, **shares, **values} for step in range(1, 13)]
    settings = {**ReplayConfig().to_dict(), "replay_dry_run": True}
    assert [each.change[:22] for each in advise(log, settings)[1]] == [words]


def test_the_log_that_goes_further_is_read(tmp_path):
    """Where `save_state` was called once, and training went on to a checkpoint."""
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=2)
    trainer.train()
    trainer.save_state()
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    assert [entry["step"] for entry in read_log(tmp_path) if "reward" in entry] == [1, 2, 3, 4]
    assert estimate(tmp_path).dead == pytest.approx(2 / 3)


def test_settings_are_found_beside_a_trainers_state_and_where_none_are_it_is_said(tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(run, Rewards([LIVE, DEAD, DEAD]), max_steps=16, save_strategy="steps", save_steps=16)
    trl_replay.attach(trainer, replay_correction="none", replay_start=0)
    trainer.train()
    uncorrected, default = "Replayed rows train as if they were fresh", "settings are not known"
    found = estimate(run / "checkpoint-16" / "trainer_state.json")
    assert uncorrected in " ".join(advice.change for advice in found.advice)
    assert default not in found.about
    shutil.copy(run / "checkpoint-16" / "trainer_state.json", tmp_path / "log.json")
    found = estimate(tmp_path / "log.json")
    assert uncorrected not in " ".join(advice.change for advice in found.advice)
    assert default in found.about


def test_a_log_alone_is_told_nothing_that_depends_on_settings(tmp_path):
    """All-wrong groups stay on purpose with this preset; by the defaults they would be a fault."""
    rewards = Rewards([LIVE, LIVE, DEAD], *[[LIVE, DEAD, DEAD]] * 30)
    trainer = make_trainer(tmp_path / "run", rewards, max_steps=60, num_iterations=2, beta=0.1, save_strategy="no")
    trl_replay.attach(trainer, replay_preset="sample_efficient", replay_buffer_size=16)
    trainer.train()
    path = tmp_path / "log.json"
    path.write_text(json.dumps(trainer.state.log_history))
    last = [entry for entry in trainer.state.log_history if "replay/size" in entry][-1]
    assert last["replay/size"] >= 16
    assert last["replay/dead_fraction_after"] >= 0.3
    assert estimate(path).advice == []


def test_a_log_is_estimated_though_the_buffer_beside_it_is_damaged(tmp_path):
    trainer = make_trainer(tmp_path, Rewards(*SCRIPT), max_steps=4, save_strategy="steps", save_steps=4)
    trl_replay.attach(trainer, replay_start=0)
    trainer.train()
    (state,) = (tmp_path / "checkpoint-4").rglob("state.json")
    state.write_text("{}")
    found = estimate(tmp_path / "checkpoint-4")
    assert found.dead == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", "\ufeffstep,frac_reward_zero_std\n1,0.5\n"),  # of a spreadsheet
        ("log.JSONL", '{"step": 1, "frac_reward_zero_std": 0.5}\n'),
        ("log.txt", '{"step": 1, "frac_reward_zero_std": 0.5}\n{"step": 2, "frac_reward_zero_std": 0.5}\n'),
        ("log.txt", '[{"step": 1, "frac_reward_zero_std": 0.5}]'),
        ("log.jsonl", '{"step": 1, "frac_reward_zero_std": 0.5}\n{"step": 2, "frac_re'),  # of a run that was killed
    ],
)
def test_logs_are_read_as_users_have_them(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert estimate(tmp_path / name).dead == 0.5


def chart(*runs):
    """A chart of W&B as CSV."""
    names = [f"{run} - train/frac_reward_zero_std{ending}" for run in runs for ending in ("", "__MIN", "__MAX")]
    return "\n".join([",".join(["train/global_step", *names]), *(f"{step}" + ",0.5" * len(names) for step in (1, 2))])


SWIFT = {"loss": 0.0, "frac_reward_zero_std": 0.5, "global_step/max_steps": "9/547", "percentage": "1%"}


@pytest.mark.parametrize(
    ("name", "text", "step"), [("chart.csv", chart("a - b"), 2), ("logging.jsonl", json.dumps(SWIFT), 9)]
)
def test_170_charts_of_a_tracker_and_logs_of_ms_swift_are_read(tmp_path, name, text, step):
    (tmp_path / name).write_text(text)
    assert estimate(tmp_path / name).dead == 0.5
    assert read_log(tmp_path / name)[-1]["step"] == step


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chart.csv", chart("one", "two"), r"several runs \(one, two\): export it with one of them"),
        ("tensorboard.csv", "Wall time,Step,Value\n1,2,0.5\n", "never logged. It has Wall time, Step, Value"),
        ("log.jsonl", '{"epoch": 1, "frac_reward_zero_std": 0.5}', "no step of its shares.*name the column 'step'"),
    ],
)
def test_170_what_a_log_lacks_is_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ReplayError, match=words):
        estimate(tmp_path / name)


@pytest.mark.parametrize(
    ("size", "dead", "words"),
    [
        (None, 0.86, "Nearly all groups fail"),
        (8, 0.86, "Nearly all groups fail"),
        (8, 0.84, "If your prompts repeat"),
        (4, 0.93, "Nearly all groups fail"),  # 0.85 ** (4 / 8) = 0.922
        (4, 0.91, "If your prompts repeat"),
        (16, 0.73, "Nearly all groups fail"),  # 0.85 ** 2 = 0.7225
        (16, 0.71, "If your prompts repeat"),
        (2, 0.97, "Two completions"),  # 0.85 ** (2 / 8) = 0.9602
        (2, 0.85, "Two completions"),
    ],
)
def test_170_nearly_all_groups_fail_at_a_pass_rate_and_not_at_a_share(write_log, said, size, dead, words):
    """At a pass rate of 8 %, 85 % are dead at 2 completions, and 51 % at 8."""
    rewards = {"reward": 0.001, "rewards/right/mean": 0.001, "rewards/right/std": 0.000999**0.5}
    path = write_log({"frac_reward_zero_std": dead, **rewards}, 8)
    found = estimate(path, size)
    assert found.advice[0].change.startswith(words)
    if size == 2:
        rest = "Nearly all groups fail" if dead > 0.96 else "If your prompts repeat"
        assert [advice.change[: len(rest)] for advice in found.advice[1:]] == [rest]
    given = [] if size is None else ["--num_generations", str(size)]
    assert ("assumes 8 completions per group" in said("estimate", path, *given)) == (size is None)


def test_170_a_checkpoint_and_a_session_know_how_many_completions_a_group_has(tmp_path, said):
    rewards = Rewards([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    sizes = {"num_generations": 2, "per_device_train_batch_size": 6}
    trainer = make_trainer(tmp_path, rewards, max_steps=12, save_strategy="steps", save_steps=12, **sizes)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    trainer.train()
    found = estimate(tmp_path)
    assert found.num_generations == 2
    assert found.advice[0].change.startswith("Two completions")
    advice = session.explain().partition("what to change")[2].splitlines()
    assert "Two completions" in advice[0]
    said("estimate", tmp_path, "--num_generations", 1, fails=True)


def test_a_reward_function_that_never_paid_is_named_from_trls_own_log():
    rewards = {"reward": 0.4, "rewards/right/mean": 0.4, "rewards/right/std": 0.49}
    silent = {"rewards/format/mean": 0.0, "rewards/format/std": 0.0}
    log = [{"step": step, "frac_reward_zero_std": 0.3, **rewards, **silent} for step in range(1, 13)]
    first = advise(log, ReplayConfig().to_dict())[1][0].change
    assert first.startswith("No completion was ever paid by 'format', so it trains nothing.")
    paid_once = [{**log[0], "rewards/format/mean": 0.1, "rewards/format/std": 0.3}, *log[1:]]
    assert not any("ever paid" in advice.change for advice in advise(paid_once, ReplayConfig().to_dict())[1])


def test_a_policy_that_became_deterministic_is_told_before_all_else():
    """Half of its prompts pass and half fail, each in every completion: nothing is left to replay for."""
    log = []
    for step in range(1, 61):
        dead, entropy = (0.3, 0.8) if step < 31 else (1.0, 0.01)
        reward = {"reward": 0.4, "rewards/right/mean": 0.4, "rewards/right/std": 0.4899}
        log.append({"step": step, "frac_reward_zero_std": dead, "entropy": entropy, **reward})
    found = advise(log, ReplayConfig().to_dict())[1]
    assert [advice.change.partition(",")[0] for advice in found] == ["Hardly a group is live any more"]
    nearly = [{**entry, "frac_reward_zero_std": min(entry["frac_reward_zero_std"], 0.96)} for entry in log]
    assert [advice.change for advice in advise(nearly, ReplayConfig().to_dict())[1]] == [found[0].change]
    varied = [{**entry, "entropy": 0.5} for entry in log]
    assert not any("any more" in advice.change for advice in advise(varied, ReplayConfig().to_dict())[1])


def test_where_prompts_come_again_the_log_tells_and_the_preset_is_what_to_set():
    """TRL logs epochs."""
    entry = {"reward": 0.4, "frac_reward_zero_std": 0.5, "rewards/right/mean": 0.4, "rewards/right/std": 0.4899}
    for epochs, first in ((4.0, "These prompts come again."), (1.0, "If your prompts repeat")):
        log = [{**entry, "step": step, "epoch": epochs * step / 40} for step in range(1, 41)]
        (advice,) = advise(log, ReplayConfig().to_dict())[1]
        assert advice.change.startswith(first)
        assert 'replay_preset="sample_efficient"' in advice.change
        assert "share of groups of 8 that fail" in advice.seen or "epoch" in advice.seen


def test_a_deterministic_policy_that_replay_led_there_is_told_what_led_there():
    log = []
    for step in range(1, 61):
        late = (
            {"replay/dead_fraction": 1.0, "entropy": 0.01}
            if step > 30
            else {"replay/dead_fraction": 0.3, "entropy": 0.8}
        )
        used = {"replay/uses_mean": 20.0 * step, "replay/all_right_fraction": 0.2, "replay/lowest_fraction": 0.5}
        log.append({"step": step, "reward": 0.3, "frac_reward_zero_std": 0.5, **late, **used})
    found = advise(log, ReplayConfig(replay_correction="none", replay_buffer_size=4).to_dict())[1]
    begins = [
        "Hardly a group is live any more",
        "Replayed rows train as if they were fresh",
        "A few stored groups are",
    ]
    assert [advice.change[: len(begin)] for advice, begin in zip(found, begins, strict=True)] == begins
    assert "replay_buffer_size=64" in found[2].change


def test_too_short_a_log_is_not_told_that_there_is_nothing_to_change(tmp_path, write_log, said):
    path = write_log({"frac_reward_zero_std": 0.996, "reward": 0.1}, 7)
    told = said("estimate", path)
    assert "Nothing to change" not in told
    assert "7 steps were logged, and 8 are needed, best with logging_steps=1" in told
    assert "99.6%" in told, "not 100 %, and 250 times the live groups"
    said("report", path)
    page = (tmp_path / "report.html").read_text()
    assert "7 steps were logged, and 8 are needed, best with logging_steps=1" in page
    assert "Nothing, as far as" not in page
