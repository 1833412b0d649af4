"""`trl-replay report A B`: what each took to the end of the first, against numbers by hand, and of real runs."""

import re
import shutil

import numpy as np
import pytest
from advised import logged
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import ReplayError
from trl_replay.extras.outcome import page
from trl_replay.extras.outcome.comparison import compare, outcomes_of
from trl_replay.extras.outcome.run import Run
from trl_replay.testing import make_trainer

SCRIPT = [[LIVE, HALF, LIVE], [DEAD, DEAD, LIVE]]


def made_up(label, reward, count=60, **values):
    """A run whose updates each train on a batch of 8 completions."""
    seed = values.pop("seed", "")
    return Run.of_log(logged(count, reward=reward, **values), label=label, seed=seed, per_batch=8)


def rising(to, since=60):
    return lambda step: to * min(step / since, 1.0)


def told(runs, reward=None):
    return " ".join(compare(outcomes_of(runs, reward)))


def test_the_goal_is_the_end_of_the_first_run_whichever_ends_higher():
    """Means over six steps: stock is at 0.5 from step 45 on, and the other one at 30."""
    stock, fast = made_up("stock", rising(0.5, 40)), made_up("fast", rising(0.8, 40), step_time=12.0)
    text = told([stock, fast])
    assert text.startswith("By reward, fast ends at 0.8, and stock at 0.5.")
    assert "To the reward at which stock ends, 0.5, stock took 360 completions, and fast 220 (39% less)" in text
    assert "stock took 450 seconds, and fast 330 (27% less)" in text
    assert "and fast 360" in told([fast, stock]).replace("stock", "slow").replace("slow never", "fast 360")
    assert "fast took 360 completions, and stock never" in told([fast, stock])


def test_a_run_that_replay_hurt_is_not_praised_for_the_goal_that_it_crossed_on_its_way_up():
    stock = made_up("stock", rising(0.5))
    hurt = made_up("hurt", lambda step: step / 40 if step <= 28 else max(0.7 - (step - 28) / 40, 0.1))
    text = told([stock, hurt])
    assert text.startswith("By reward, hurt ends at 0.1, and stock at 0.479.")
    assert "hurt did not stay there: it crossed that value, and ends below it." in text
    assert "hurt fell after its best of 0.6" in text
    assert "less" not in text.partition("This proves")[0]
    assert "more" not in text.partition("This proves")[0]


def test_a_first_run_that_fell_or_never_rose_is_told_so():
    fallen = made_up("stock", lambda step: step / 60 if step <= 30 else 0.25)
    assert "stock fell after its best of 0.4" in told([fallen, made_up("b", rising(0.5))])
    flat = made_up("stock", lambda step: 0.3)
    assert "stock did not rise by more than its error: its end is no goal." in told([flat, made_up("b", rising(0.5))])
    wavers = made_up("stock", lambda step: 0.3 + 0.1 * (step % 3 == 0) + 0.0005 * step)
    assert "its end is no goal" in told([wavers, made_up("b", rising(0.5))])


def test_a_second_update_of_a_batch_generates_no_completions():
    """The control that docs ask for: 120 updates, 60 batches of 8."""
    log = []
    for entry in logged(60, reward=rising(0.5)):
        log += [{**entry, "step": 2 * entry["step"] - 1}, {"step": 2 * entry["step"], "loss": 0.0, "step_time": 2.0}]
    twice = Run.of_log(log, label="two updates", per_batch=8)
    assert twice.spent("completions")[-1] == 480
    assert twice.spent("seconds")[-1] == 60 * 12
    text = told([made_up("stock", rising(0.5)), twice])
    assert "stock took 480 completions, and two updates 480 (as many)" in text
    assert "stock took 600 seconds, and two updates 718 (20% more)" in text
    assert "assumed" not in text
    seldom = [entry for entry in logged(60, reward=rising(0.5)) if entry["step"] % 2 == 0]
    text = told([Run.of_log(seldom, label="stock", per_batch=8), made_up("b", rising(0.5))])
    assert "Not every update was logged: one update a batch is assumed (logging_steps=1 tells)." in text


@pytest.mark.parametrize(("seeds", "enough"), [(2, False), (3, True)])
def test_seeds_are_compared_one_by_one_and_three_a_label_are_enough(seeds, enough):
    ends = (0.4, 0.5, 0.6)
    runs = [made_up("a", rising(ends[seed]), seed=f"-seed{seed}") for seed in range(seeds)]
    runs += [made_up("b", rising(ends[seed] + 0.1), seed=f"-seed{seed}") for seed in reversed(range(seeds))]
    text = told(runs)
    assert f"higher on {seeds} of {seeds} seeds" in text
    assert ("proves nothing" in text) != enough
    assert "(0.383 to 0.575)" in text or not enough


def test_of_two_seeds_in_the_middle_the_mean_counts_and_a_seed_that_did_not_rise_sets_no_goal():
    runs = [made_up("a", rising(0.5, 40), seed=f"-seed{seed}") for seed in range(4)]
    runs += [made_up("b", rising(0.5, since), seed=f"-seed{seed}") for seed, since in enumerate((10, 20, 40, 50))]
    own = [run.curve("reward", "completions").first(0.5 - 1e-9) for run in runs]
    less = np.median(1 - np.array(own[4:]) / own[:4])
    assert f"({less:.0%} less (" in told(runs)
    assert f"and b {np.median(own[4:]):,.0f} (" in told(runs)
    runs[0] = made_up("a", lambda step: 0.3, seed="-seed0")
    assert "at which a ends on 3 of 4 seeds, 0.5, " in told(runs)


def test_runs_are_compared_by_tokens_or_updates_where_not_all_tell_their_completions():
    known = Run.of_log(logged(60, reward=rising(0.5), **{"replay/rollouts": lambda step: 8.0 * step}), label="a")
    of_tokens = Run.of_log(logged(60, reward=rising(0.5)), label="b")
    assert "took 540,000 tokens" in told([known, of_tokens])
    bare = [{name: value for name, value in entry.items() if name != "num_tokens"} for entry in of_tokens.log]
    assert "took 60 updates" in told([known, Run.of_log(bare, label="b")])


def test_evaluations_are_compared_before_the_reward_of_training():
    runs = []
    for label, end in (("stock", 0.4), ("replay", 0.32)):
        log = [*logged(60, reward=rising(0.5))]
        log += [{"step": 15.0 * at, "eval_reward": end * at / 4, "eval_loss": 0.0} for at in range(1, 5)]
        runs.append(Run.of_log(sorted(log, key=lambda entry: entry["step"]), label=label, per_batch=8))
    text = told(runs)
    assert text.startswith("By reward on evaluation prompts, replay ends at 0.28, and stock at 0.35.")
    assert "By reward, replay ends at" in text
    assert "By reward on evaluation" not in told([runs[0], made_up("b", rising(0.5))]), "only one was evaluated"


def test_the_function_that_counts_is_the_one_that_runs_name_and_several_names_are_refused():
    functions = {"rewards/length/mean": 0.5, "rewards/length/std": 0.1}
    stock = made_up("stock", rising(0.5), **functions)
    named = made_up("replay", rising(0.5), **functions, **{"replay/judged_by/length": 1.0})
    assert told([stock, named]).startswith("By length, replay ends at 0.5, and stock at 0.5.")
    assert told([stock, named], "accuracy").startswith("By accuracy, ")
    assert "Name the one that counts: --reward accuracy or length" in told([stock, stock])
    other = made_up("other", rising(0.5), **functions, **{"replay/judged_by/accuracy": 1.0})
    with pytest.raises(ReplayError, match="several values of replay_reward: accuracy, length"):
        told([named, other])
    with pytest.raises(ReplayError, match="The log of stock has no reward 'style'"):
        told([stock, named], "style")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a stock run and one with replay."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("stock", "replay"):
        trainer = make_trainer(folder / name, Rewards(*SCRIPT), max_steps=6)
        if name == "replay":
            trl_replay.attach(trainer, replay_start=0)
        trainer.train()
        trainer.save_state()
    return folder


def test_real_runs_are_told_in_sentences_a_table_and_a_page(runs, said):
    out = runs / "page" / "two.html"
    given = (runs / "stock", f"mine={runs / 'replay'}", "--html", out, "--completions", 12)
    printed = said("report", *given)
    for text in (printed, out.read_text()):
        assert "By reward, mine ends at 0.0833, and stock at 0.0833." in " ".join(text.split())
        assert "This proves nothing yet" in text
        assert [text.count(share) for share in ("55.6%", "72")] >= [2, 2], "dead groups, and completions"
    assert f"written: {out}" in printed
    assert {"stock generated", "mine generated", "mine trained on"} <= set(
        re.findall(r"> ([^<]+)</text>", out.read_text())
    )


def test_a_series_has_a_color_of_its_own_and_the_mean_and_the_range_of_its_seeds(monkeypatch):
    drawn = {}
    monkeypatch.setattr(page, "_svg", lambda figure: drawn.setdefault(len(drawn), figure.axes[0]) and "")
    runs = [
        made_up(label, rising(end), seed=f"-s{seed}") for label in "ab" for seed, end in enumerate((0.3, 0.4, 0.8))
    ]
    charts = page.charts_of(runs, "reward")
    reward = drawn[list(charts).index("Reward over completions")]
    assert len({line.get_color() for line in reward.lines}) == len(reward.lines) == len(reward.collections) == 2
    assert reward.lines[0].get_ydata()[-1] == pytest.approx(0.5)
    low, high = reward.collections[0].get_datalim(reward.transData).intervaly
    assert (low, high) == pytest.approx((0.3 / 60, 0.8))
    dead = drawn[list(charts).index("Dead groups")]
    assert [line.get_ydata()[0] for line in dead.lines] == pytest.approx([0.3, 0.3])


def test_folders_that_differ_by_a_seed_need_no_label(tmp_path, runs):
    names = ["stock-seed0", "stock-seed1", "preset_s0", "lr1e-5", "lr1e-6", "size64", "size128", "seed3", "lr=1e-5"]
    for name in names:
        shutil.copytree(runs / "stock", tmp_path / name)
    given = [*(str(tmp_path / name) for name in names), f"mine={tmp_path / 'lr=1e-5'}"]
    read = [Run.of_folder(one) for one in given]
    assert [run.label for run in read] == ["stock", "stock", "preset", *names[3:], "mine"]
    assert [run.seed for run in read[:3]] == ["-seed0", "-seed1", "_s0"]


def test_more_runs_than_fit_side_by_side_have_a_row_each(tmp_path, runs, said):
    names = [f"{policy}-seed{seed}" for policy in ("stock", "reservoir") for seed in range(3)]
    for name in names:
        shutil.copytree(runs / "stock", tmp_path / name)
    lines = said("report", *(tmp_path / name for name in names)).splitlines()
    assert [any(line.startswith(f"│ {name} ") and "55.6%" in line for line in lines) for name in names] == [True] * 6


def test_an_option_that_cannot_be_used_is_refused(runs, said):
    told = said("report", runs / "stock", runs / "replay", "--completions", 0, fails=True)
    assert "--completions=0 can't be used: give a number of at least 1" in told
