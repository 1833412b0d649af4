"""Completions to stock's final accuracy, by ledgers made by hand."""

import importlib
import json
from math import inf
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    study = importlib.import_module("when_it_pays")
    monkeypatch.setattr(importlib.import_module("runs"), "RESULTS", tmp_path)
    return study


def told(study, curves, task="products"):
    """The rows but stock's, for a ledger with these accuracies at equal distances, 768 completions on products."""
    every, goal = study.TASKS[task].accuracy_every, study.GOALS.get(task, "stock")
    lines = [
        {"task": task, "arm": arm, "rate": 1e-5, "seed": seed, "batch": every * number, "sampled": value}
        for (arm, seed), values in curves.items()
        for number, value in enumerate(values)
    ]
    path = importlib.import_module("runs").RESULTS / "when_it_pays.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [row for row in study.to_the_goal(study.STUDY.finished())[4:] if f"| {goal} |" not in row]


def test_an_arm_is_compared_by_the_completions_to_the_final_accuracy_of_stock_on_its_seed(study):
    curves = {("stock", 0): [0.0, 0.1, 0.2, 0.3, 0.4], ("stock", 1): [0.0, 0.1, 0.2, 0.3, 0.8]}
    curves |= {("sample_efficient", 0): [0.0, 0.2, 0.6, 0.6, 0.6], ("sample_efficient", 1): [0.0, 0.4, 0.7, 0.8, 0.7]}
    curves |= {("sample_efficient", 2): [0.0, 0.9, 0.9, 0.9, 0.9], ("sample_efficient", 100): [0.9] * 5}
    # Seed 0 crosses 0.4 halfway from 768 to 1,536; seed 1 is at 0.8 after 2,304, and ends below; seed 2 has no stock.
    (row,) = told(study, curves)
    there = "never (1,152 to never) | 3,072 | – | 1 of 2, 1 lost it"
    assert row.startswith(f"| products | sample_efficient | 1e-05 | {there} | 0.65 | +0.050 ±")
    del curves["stock", 1]
    # 1,152 of 3,072 completions, 3/8: two updates and two forward passes are 8/3 of stock's training.
    hours = [(3 / 8) * (8 / 3 + cost) / (1 + cost) for cost in (0.2, 1, 5, 20)]
    (row,) = told(study, curves)
    assert row == (
        "| products | sample_efficient | 1e-05 | 1,152 | 3,072 | 2.7 | 1 of 1 | 0.60 | +0.200 | "
        + " | ".join(f"{share:.2f}" for share in hours)
        + " |"
    )


def test_an_arm_that_never_gets_there_is_told_so(study):
    curves = {("stock", seed): [0.0, 0.1, 0.2, 0.3, 0.4] for seed in (0, 1, 2)}
    curves |= {("defaults", seed): [0.0, 0.1, 0.1, 0.1, 0.1 + 0.1 * seed] for seed in (0, 1, 2)}
    (row,) = told(study, curves)
    assert row.startswith("| products | defaults | 1e-05 | never | 3,072 | – | 0 of 3 | 0.20 | −0.200 ±")
    assert row.endswith(" | – | – | – | – |")


def test_a_goal_below_the_accuracy_before_training_saves_nothing(study):
    (row,) = told(study, {("stock", 0): [0.1, 0.3, 0.2, 0.1, 0.05], ("topr", 0): [0.1, 0.2, 0.3, 0.4, 0.4]})
    assert row == "| products | topr | 1e-05 | 0 | 0 | 1.0 | 1 of 1 | 0.40 | +0.350 | 1.00 | 1.00 | 1.00 | 1.00 |"


def test_the_goal_on_topics_is_stock_at_the_rate_at_which_it_does_not_collapse(study):
    curves = {("stock", 0): [0.0, 0.1, 0.1], ("stock at 4e-5", 0): [0.0, 0.2, 0.4], ("topr", 0): [0.0, 0.4, 0.5]}
    rows = told(study, curves, "topics")
    assert [row[: row.index(" 2,560")] for row in rows] == [
        "| topics | stock | 1e-05 | never |",
        "| topics | topr | 1e-05 | 1,280 |",
    ]


def test_several_rounds_of_generation_cost_generation_and_no_training(study):
    completions = importlib.import_module("completions")
    lines = [{"batch": 0, "rollouts": 0, "sampled": 0.0}, {"batch": 10, "rollouts": 640, "sampled": 0.5}]
    measured = completions.Measured.of(lines, 32)
    assert measured.first(0.25) == completions.Spent(generated=10, trained=5), "halfway in both"
    assert measured.first(0.25).hours(passes=1, cost=2) == 2 * 10 + 5
    assert completions.saving(measured, measured).hours(1, 2) == 1
    assert measured.first(0.6) == (inf, inf)


def test_an_arm_takes_fewer_hours_from_some_cost_of_generation_on(study):
    completions = importlib.import_module("completions")

    def savings(trained):
        return [completions.Saving(completions.Spent(100, 100), completions.Spent(trained, trained), 0.5, 0.0, False)]

    assert completions.break_even(savings(50), passes=3) == 1, "50 (3 + 1) = 100 (1 + 1)"
    assert completions.break_even(savings(50), passes=1) == 0, "at any"
    assert completions.break_even(savings(100), passes=3) == completions.break_even(savings(inf), passes=3) == inf


def test_an_arm_costs_its_updates_and_the_forward_passes_that_it_makes(study):
    passes = {arm: study.ARMS[arm].passes for arm in study.ARMS}
    assert passes["stock"] == passes["topr"] == passes["dynamic sampling"] == 1
    assert passes["stock, 2 updates"] == pytest.approx(2 + 1 / 3), "old log-probs"
    assert passes["sample_efficient"] == pytest.approx(2 + 2 / 3), "and those of the reference"
