"""What the rules refer to is there, and they find no fault with the benchmarks' runs that went well."""

import json
import re
import statistics
from pathlib import Path

import pytest

from trl_replay import ReplayConfig
from trl_replay.extras.outcome.rules import CONDITION, MEANS, RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNS = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "efficiency.jsonl").read_text().splitlines()]
FAULTS = {"stale buffer", "masked rows", "no correction", "overused", "dead groups stay"}
"""Rules that find something wrong with replay itself."""


def test_every_rule_leads_to_a_section_that_says_why():
    for rule in RULES:
        page, _, anchor = rule.section.partition("#")
        text = (DOCS / page).read_text()
        headings = [re.sub(r"[^\w\s-]", "", title).lower().split() for title in re.findall(r"^##+ (.+)$", text, re.M)]
        assert anchor.split("-") in [[part for word in words for part in word.split("-")] for words in headings]


def applying(facts):
    """Names of the rules that apply with the defaults but for `facts`, means of metrics among them."""
    means = {name: facts[key] for name, key in MEANS.items() if key in facts}
    means |= {"dead groups": facts.get("replay/dead_fraction"), "replay": True, "the reward rose": False}
    means = {"all right groups": 0.0, "untrained groups": 0.0, **means}
    return {rule.name for rule in RULES if rule.applies({**ReplayConfig().to_dict(), **facts, **means})}


def faults(run):
    """Of the means over a whole run."""
    settings = ReplayConfig(**run["settings"]).with_preset().to_dict()
    return applying({**settings, **run["replay"]}) & FAULTS


def test_few_reported_runs_that_learned_as_much_as_the_defaults_are_found_at_fault():
    reported = [run for run in RUNS if run["seed"] < 100]
    usual = {
        task: statistics.median(
            run["final_reward"] for run in reported if run["arm"] == "defaults" and run["task"] == task
        )
        for task in {run["task"] for run in reported}
    }
    learned = {task for task, reward in usual.items() if reward >= 0.05}  # by the defaults
    reported = [run for run in reported if run["task"] in learned]
    well = [run for run in reported if run["replay"] and run["final_reward"] >= usual[run["task"]]]
    assert len(well) > 100
    found = [run for run in well if faults(run)]
    assert len(found) <= 0.03 * len(well)


def test_no_run_that_is_found_to_be_stale_learned_much_on_the_lock():
    """As the evidence of the rule says, of these runs and of others."""
    stale = [run for run in RUNS if run["replay"] and run["task"] == "lock" and "stale buffer" in faults(run)]
    assert len(stale) >= 5
    assert max(run["final_reward"] for run in stale) <= 0.64


def test_runs_whose_groups_were_used_most_ended_at_little():
    """As the evidence of the rule for overused groups says."""
    often = {run["final_reward"] for run in RUNS if run["replay"].get("replay/uses_mean", 0) > 140}
    assert len([run for run in RUNS if run["replay"].get("replay/uses_mean", 0) > 140]) == 7
    assert max(often) <= 0.15
    assert max(run["replay"].get("replay/uses_mean", 0) for run in RUNS if run["final_reward"] > 0.9) < 140


def test_all_benchmark_runs_that_stayed_dead_ended_at_nothing():
    """As the evidence of the rule for all-wrong groups says."""
    dead = [run for run in RUNS if run["arm"] == "stock" and run["dead"] >= 0.975]
    assert len(dead) == 17
    assert max(run["final_reward"] for run in dead) < 0.001


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_applies_at_its_bounds_and_not_beyond(rule):
    facts, beyond = ReplayConfig().to_dict(), {}
    for condition in rule.when:
        for part in condition.split(" | "):
            name, sign, wanted = CONDITION.fullmatch(part).groups()
            if sign in "≥≤<":
                bound = float(wanted) - (1e-6 if sign == "<" else 0)
                facts[name], beyond[name] = bound, bound + (-2e-6 if sign == "≥" else 2e-6)
            else:
                facts[name] = wanted.split(" or ")[0] if sign == "is" else "another"
    assert rule.applies(facts)
    for name, value in beyond.items():
        if not any(name in condition and " | " in condition for condition in rule.when):
            assert not rule.applies({**facts, name: value})
            assert not rule.applies({one: value for one, value in facts.items() if one != name})


def test_the_wait_of_an_adaptive_start_is_no_fault():
    """It ends with 16 stored groups; without it the lock ended lower."""
    waiting = {"replay/dead_fraction_after": 0.96, "replay/replaced_fraction": 0.0, "replay/all_wrong_fraction": 0.96}
    assert applying({**waiting, "replay/size": 15.0}) == set()
    assert applying({**waiting, "replay/size": 16.0}) == {"dead groups stay"}
