"""What a log is told, by made logs and real ones: each gets its line, and none is told something false."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from advised import alarms_in, logged, said_of

from trl_replay.extras.outcome.advice import ALARMS, TABLE, cells_of

ROOT = Path(__file__).parents[2]
REWARDS, KINDS = ("short", "unseen", "rose", "flat", "fell"), "few summed hidden half failing unclear solved none"
STATES = [("none", *ALARMS), REWARDS, KINDS.split(), ("one", "several", "unknown"), ("off", "dry", "idle", "acting")]


@pytest.mark.parametrize("alarm", STATES[0])
def test_every_state_has_one_line_and_a_run_is_never_told_to_do_what_it_does(alarm):
    for state in itertools.product([alarm], *STATES[1:]):
        ((*_, change, _),) = cells_of(state)
        _, reward, dead, updates, replay = state
        change = change.lower()
        if alarm == "none":
            assert "two updates" not in change or updates == "one", state
            assert "num_iterations" not in change or updates == "one", state
            assert ("leave it out here" in change) <= (replay == "idle"), state
            assert ("too few steps" in change) == (reward == "short"), state
            assert ("reward fell" in change) == (reward == "fell" and (dead != "none" or replay == "acting")), state
            assert ("did not rise" in change) <= (reward == "flat"), state
            assert ("attach" in change or "take replay_preset" in change) <= (replay in ("off", "dry")), state
            assert (change.startswith("nothing")) <= (reward == "rose" and replay == "acting"), state
            assert (replay == "idle" and reward in REWARDS[2:] and dead not in ("hidden", "none")) <= (
                "leave it out here" in change
            ), state


def test_every_line_is_reached_and_leads_to_a_section_that_says_why():
    reached = {id(cell) for state in itertools.product(*STATES) for cell in cells_of(state)}
    assert reached == {id(row) for row in TABLE}
    for *_, page in TABLE:
        name, _, anchor = page.partition("#")
        headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\s-]", "", title).lower().replace(" ", "-") for title in headings]


def way(*points, count=60, noise=0.02, seed=0):
    """A reward that passes through points at equal distances, with noise."""
    random = np.random.default_rng(seed)
    values = np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(points)), points)
    values = (values + noise * random.standard_normal(count)).clip(0, 1)
    return lambda step: float(values[step - 1])


def made(*points, count=60, dead=0.3, noise=0.02, **values):
    return logged(count, reward=way(*points, count=count, noise=noise), frac_reward_zero_std=dead, **values)


def several(log):
    """The same with a second update of each batch."""
    found = []
    for entry in log:
        found += [entry, {"loss": 0.0, "grad_norm": 0.1, "step_time": 3.0}]
    return [{**entry, "step": step} for step, entry in enumerate(found, 1)]


def replayed(log, replaced=0.3, redrawn=0.0, dry=False, **values):
    """The same as replay logs it: dead groups fail, unless `values` say otherwise."""
    found = []
    for entry in log:
        dead = entry.get("frac_reward_zero_std")
        shares = {"replay/redrawn_fraction": redrawn} if dead is None else {
            "replay/dead_fraction": dead, "replay/dead_fraction_after": 0.1, "replay/replaced_fraction": replaced,
            "replay/all_wrong_fraction": dead, "replay/all_right_fraction": 0.0,
            "replay/rollouts": 8.0 * entry["step"],
            **({"replay/dry_run": 1.0} if dry else {}),
            **{f"replay/{name.replace('__', '/')}": value for name, value in values.items()},
        }  # fmt: skip
        found.append({**entry, **shares})
    return found


def scored(log, **ways):
    """The same with the means of several functions, whose sum is the reward."""
    found = []
    for entry in log:
        means = {name: value(entry["step"]) if callable(value) else value for name, value in ways.items()}
        parts = {f"rewards/{name}/{part}": of for name, mean in means.items()
                 for part, of in (("mean", mean), ("std", (mean * max(1 - mean, 0)) ** 0.5))}  # fmt: skip
        own = {key: value for key, value in entry.items() if not key.startswith("rewards/")}
        found.append({**own, **parts, "reward": sum(means.values())})
    return found


def evaluated(log, *values):
    every = len(log) // len(values)
    marks = [{"step": every * at, "eval_reward": value, "eval_loss": 0.0} for at, value in enumerate(values, 1)]
    return sorted([*log, *marks], key=lambda entry: entry["step"])


def of_file(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


HACKED = {"accuracy": way(0.5, 0.1), "length": way(0.1, 0.9)}
YOUNGER = "set a lower replay_max_age"
TWO = "two updates a batch"
FELL, FLAT, FEW = "the reward fell from", "did not rise by more than its error", "leave replay out"
PRESET, HELPED, IDLE = 'take replay_preset="sample_efficient"', "whether replay helped", "leave it out here"
LATE = lambda step: 0.3 if step < 40 else 0.98  # noqa: E731
LOGS = {
    # stock, by its reward
    "rise": (made(0.1, 0.6), TWO),
    "rise with noise": (made(0.1, 0.6, noise=0.1), TWO),
    "fall by .2": (made(0.1, 0.65, 0.52, count=200), FELL),
    "fall by .6": (made(0.1, 0.65, 0.26), FELL),
    "fall to nothing": (made(0.1, 0.65, 0.02, 0.0, dead=LATE), "begin again, with half"),
    "overshoot": (made(0.1, 0.8, 0.6, 0.6, count=100), FELL),
    "dip and rise": (made(0.3, 0.6, 0.3, 0.65), TWO),
    "fall of negative rewards": (logged(60, reward=lambda step: 0.5 - abs(step - 25) / 20), FELL),
    "flat": (made(0.3, 0.3), FLAT),
    "flat, sparse noise": (made(0.03, 0.03, count=200, noise=0.02), FLAT),
    "short": (made(0.1, 0.6, count=19), "too few steps to tell"),
    "short, and dead at its end": (made(0.3, 0.0, 0.0, count=10, dead=lambda at: min(at / 5, 1.0)), "too few"),
    "no reward": ([{"step": at, "loss": 0.0, "frac_reward_zero_std": 0.5} for at in range(1, 41)], "evaluate"),
    # stock, by its dead groups
    "half dead": (made(0.1, 0.4, dead=0.55), PRESET + " with GRPOConfig(num_iterations=2"),
    "half dead, two updates": (several(made(0.1, 0.4, dead=0.55)), PRESET + " with as many updates"),
    "two updates": (several(made(0.1, 0.6)), "are dead: leave replay out; with scale"),
    "nearly all fail": (made(0.01, 0.02, dead=0.95, noise=0.005), "attach replay"),
    "nearly all dead, graded": (made(0.1, 0.4, dead=0.9, rewards__accuracy__std=0.9), "does not tell whether"),
    "solved": (made(0.3, 0.95, 0.95, dead=0.8), "most prompts are solved"),
    "solved at once": (logged(60, reward=1.0, frac_reward_zero_std=1.0), "score a nonsense text"),
    "all dead": (logged(60, reward=0.0, frac_reward_zero_std=1.0), "no group was ever live"),
    # several functions
    "length bonus": (scored(made(0, 0), **HACKED), "if this one counts: 'accuracy' fell"),
    "both rise": (scored(made(0, 0), accuracy=way(0.1, 0.6), format=way(0.2, 0.9)), "by the sum of the rewards"),
    "never paid": (scored(made(0, 0), accuracy=0.0, format=way(0.3, 0.9)), "score a right answer with 'accuracy'"),
    "never paid, all dead": (scored(made(0, 0, dead=1.0), accuracy=0.0, format=0.5), "answer with 'accuracy'"),
    "dead behind the sum": (
        replayed(
            scored(made(0, 0, dead=0.05), accuracy=way(0.05, 0.1), length=way(0.3, 0.5)), 0.01,
            dead_fraction__accuracy=0.8, live_without__accuracy=0.75, dead_fraction__length=0.0,
        ),
        "most groups are dead by 'accuracy'",
    ),
    # certain and wrong
    "no gradient": (made(0.3, 0.3, grad_norm=0.0), "find out why grad_norm"),
    "NaN": (made(0.3, 0.3, grad_norm=float("nan"), dead=0.5), "find out why grad_norm"),
    "NaN rewards": (logged(60, reward=float("nan")), "no reward function scores"),
    "rows that nobody scored": (replayed(made(0.2, 0.3), failed_rows=4.0), "no reward function scores"),
    "cut off": (made(0.0, 0.0, dead=1.0, noise=0, completions__clipped_ratio=0.97), "raise max_completion_length"),
    "cut off, rising": (made(0.1, 0.6, completions__clipped_ratio=0.97), TWO),
    "cut off and masked": (
        replayed(made(0.2, 0.3, completions__clipped_ratio=0.4), untrained_fraction=0.2),
        "raise max_completion_length",
    ),
    "every tool call fails": (made(0.0, 0.0, dead=1.0, noise=0, tools__failure_frequency=1.0), "repair the tools"),
    "vLLM far off": (made(0.1, 0.6, sampling__sampling_logp_difference__mean=0.45), "make vLLM's log-probs agree"),
    "deterministic": (
        replayed(made(0.3, 0.4, dead=LATE, entropy=lambda step: 0.8 if step < 40 else 0.01),
                 all_right_fraction=0.4),
        "begin again, with half",
    ),
    "evaluation falls": (evaluated(made(0.1, 0.6), 0.3, 0.5, 0.38, 0.35), "checkpoint of the best evaluation"),
    "evaluation wavers": (evaluated(made(0.1, 0.6), 0.3, 0.4, 0.5, 0.48), TWO),
    "clipped": (replayed(made(0.1, 0.6), clip_ratio=0.9, sequence_drift_mean=0.02), "raise epsilon and epsilon_high"),
    "weightless": (
        [{**entry, "replay/weight_negative": 1 / entry["step"]} for entry in replayed(made(0.1, 0.6))],
        YOUNGER,
    ),
    "failures left out by intent": (replayed(made(0.1, 0.6), weight_negative=0.0), HELPED),
    # replay
    "acting, rise": (replayed(made(0.1, 0.6)), HELPED),
    "acting in further updates": (replayed(several(made(0.1, 0.6)), 0.02, 0.7), HELPED),
    "acting, flat": (replayed(made(0.2, 0.2, dead=0.6)), "halve the learning_rate, and compare"),
    "hurt": (replayed(made(0.1, 0.6, 0.25, dead=0.6)), "replay may have done harm"),
    "acting, solved": (replayed(made(0.3, 0.9, dead=0.8), all_right_fraction=0.8), "most prompts are solved"),
    "idle": (replayed(made(0.1, 0.6), 0.02), "replaced 2% of the groups and drew 0%"),
    "idle, two updates": (replayed(several(made(0.1, 0.6)), 0.04, 0.01), IDLE),
    "dry, half dead": (replayed(made(0.1, 0.4, dead=0.6), dry=True), PRESET),
    "dry, few dead": (replayed(made(0.1, 0.6), dry=True), TWO),
    # real runs
    "stock on products": (of_file("products_stock_log.jsonl"), PRESET),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_each_log_gets_its_line(name):
    log, words = LOGS[name]
    assert words.lower() in said_of(log).lower()


def test_no_healthy_log_has_an_alarm():
    for name in (
        "rise",
        "flat",
        "solved",
        "half dead",
        "two updates",
        "acting, rise",
        "idle",
        "both rise",
        "dry, few dead",
    ):
        assert alarms_in(LOGS[name][0]) == [], name
