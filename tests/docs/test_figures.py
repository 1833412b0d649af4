"""The figures in the documentation are those of the results beside it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def results_of(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def refill_tables(refill: Any, results: Any) -> list[list[str]]:
    return [refill.table(task, results["tasks"][task], results["arms"]) for task in ("lock", "addition")]


TABLES: list[tuple[str, str, str, Any]] = [
    # page, file of results, benchmark, and what makes tables of them, each a list of lines
    ("docs/evidence.md", "learning", "learning_report", lambda report, found: [report.overview(found)]),
    ("docs/evidence-defaults.md", "refill", "refill", refill_tables),
    ("docs/evidence-methods.md", "papers", "papers_report", lambda report, found: list(report.tables(found).values())),
    (
        "docs/evidence-cost.md",
        "overhead_tables",
        "overhead",
        lambda overhead, found: [overhead.size_table(found["checks"])],
    ),
    ("docs/asynchronous.md", "asynchronous", "asynchronous", lambda bench, found: [bench.table(found)]),
    ("docs/evidence-cost.md", "long", "long", lambda long, found: [long.table(found)]),
]


@pytest.mark.parametrize(("page", "name", "benchmark", "tables"), TABLES)
def test_what_a_benchmark_found_is_what_a_page_says(page: str, name: str, benchmark: str, tables: Any) -> None:
    results = results_of(name)
    assert not results.get("quick")
    made = tables(importlib.import_module(benchmark), results)
    assert made
    text = (ROOT / page).read_text()
    for table in made:
        assert "\n".join(table) in text, f"{page} lacks this table, which benchmarks/{benchmark}.py prints"


def test_what_learns_most_from_a_completion_is_what_the_page_says() -> None:
    report = importlib.import_module("efficiency_report")
    records = [json.loads(line) for line in (RESULTS / "efficiency.jsonl").read_text().splitlines()]
    names = ("evidence-defaults", "evidence-preset", "howto/several-rewards")
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in names]
    assert [table for table in report.tables(records) if not any("\n".join(table) in page for page in pages)] == []


def test_the_gain_on_addition_is_told_late_and_early() -> None:
    records = [json.loads(line) for line in (RESULTS / "efficiency.jsonl").read_text().splitlines()]
    accuracies: dict[str, dict[int, float]] = {"stock": {}, "defaults": {}}
    for record in records:
        if record["task"] == "addition" and record["arm"] in accuracies and record["seed"] < 5:
            assert record["budget"] == 12_800
            accuracies[record["arm"]][record["seed"]] = record["accuracy"]
    early = importlib.import_module("real_model_report").paired(accuracies["defaults"], accuracies["stock"])
    found = results_of("learning")["tasks"]["addition"]
    late = importlib.import_module("learning_report").difference(found["summary"]["corrected"])
    assert found["runs"][0]["rollouts"] == 32_000
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert f"**{late}**" in page
    assert f"after 12,800 completions it is {early}" in page


def test_what_the_real_model_showed_is_what_the_page_says() -> None:
    report = importlib.import_module("real_model_report")
    found = report.records_of(RESULTS / "real_model.jsonl")
    arms = report.finished(found)
    assert "stock" in arms
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert "\n".join(report.table(arms)) in page
    rows = [row.strip("| ").split(" | ") for row in report.pilots(found)]
    accuracy = {(arm, rate): value for arm, rate, *_, value in rows[2:]}
    high, low = (accuracy[f"sample_efficient{beta}", "1e-05"] for beta in (" with beta=2", ""))
    assert f"accuracy after 25 batches was {high} instead of {low}" in " ".join(page.split())


def test_the_demo_trains_at_the_rates_that_the_benchmark_chose() -> None:
    from trl_replay.demo.lock import LEARNING_RATES

    chosen = results_of("learning")["tasks"]["lock"]["chosen"]
    assert {"stock": chosen["stock"], "replay": chosen["corrected"]} == LEARNING_RATES


def test_the_cards_say_what_was_measured_of_their_methods() -> None:
    from trl_replay_papers import METHODS, card

    report, results = importlib.import_module("papers_report"), results_of("papers")
    for name in METHODS:
        told = " ".join(card(name).sections["Measured here"].split())
        assert told == report.measured(results, name), "python benchmarks/papers_report.py --write"


def test_what_is_said_of_long_completions_was_measured_at_their_length() -> None:
    long, results = importlib.import_module("long"), results_of("long")
    assert (results["tokens"], results["group"]) == (long.TOKENS, long.GENERATIONS)


def test_what_the_study_of_replay_on_a_real_model_has_found_is_what_the_page_says() -> None:
    study = importlib.import_module("when_it_pays")
    page = (ROOT / "docs" / "evidence-when.md").read_text()
    assert "\n".join(study.to_the_goal(study.finished())) in page, "python benchmarks/when_it_pays.py --table"


def test_what_several_updates_a_batch_were_measured_to_save_is_what_the_page_says() -> None:
    ratio = importlib.import_module("updates_per_batch")
    done, page = ratio.finished(), (ROOT / "docs" / "evidence-ratio.md").read_text()
    told = [ratio.to_the_goal(done)[2:], ratio.beside(done), ratio.curve(done, "french")[:3]]
    assert all("\n".join(rows) in page for rows in told), "python benchmarks/updates_per_batch.py --table"


def test_what_a_second_run_was_measured_to_learn_is_what_the_page_says() -> None:
    second = importlib.import_module("second_runs")
    page = (ROOT / "docs" / "evidence-second-run.md").read_text()
    assert "\n".join(second.table(second.finished(second.RESULTS))) in page, "python benchmarks/second_runs.py --table"


def test_what_replay_costs_on_a_gpu_is_what_the_pages_say() -> None:
    measured = results_of("gpu")["costs"]
    waiting, more = measured["synchronised"], []
    for timed in (waiting, measured["free running"]):
        more.append(timed["step with replay, ms"] - timed["stock step, ms"])
    page = " ".join((ROOT / "docs" / "evidence-cost.md").read_text().split())
    step, inside = waiting["stock step, ms"], waiting["time in the seam, ms"]
    share = f"{inside / step:.0%}".replace("%", " %")
    assert f"takes {step:.0f} ms, and {inside:.0f} ms are spent in the seam, **{share}**" in page
    assert [round(each, -1) for each in more] == [30, 40]
    assert measured["forwards added"] == 0
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{inside:.0f} ms on an H200, {share} of a step of {step:.0f} ms" in readme


def test_a_dry_run_on_a_gpu_logged_what_stock_did() -> None:
    """The same seeds and rates in two ledgers: runs without replay, and with a dry run."""
    study, second = importlib.import_module("when_it_pays"), importlib.import_module("second_runs")
    stock = study.ledger(second.RESULTS.with_name("updates_per_batch.jsonl"))
    dry = {run: lines for run, lines in study.ledger(second.RESULTS).items() if run.arm == "first run"}
    assert len(dry) == 6
    for run, lines in dry.items():
        for one, other in zip(lines, stock[study.Run(run.task, "stock", run.rate, run.seed)], strict=False):
            for name in ("batch", "reward", "sampled", "entropy", "grad_norm", "found"):
                assert one.get(name) == other.get(name)


def test_the_hours_that_the_preset_saves_are_what_the_page_says() -> None:
    study, completions = importlib.import_module("when_it_pays"), importlib.import_module("completions")
    passes = study.ARMS["sample_efficient"].passes
    savings = [study.savings_of(study.finished(), task)["sample_efficient"] for task in ("french", "products")]
    page = " ".join((ROOT / "docs" / "when-replay-pays.md").read_text().split())
    french, products = (f"{completions.break_even(of, passes):.1f}" for of in savings)
    assert f"takes more than {french} training passes over it on *french*, and {products} on *products*" in page
    french, products = (f"{np.median([saving.hours(passes, 5) for saving in of]):.2f}" for of in savings)
    assert f"at five, the preset takes {french} and {products} of stock's hours" in page


def test_what_tells_beforehand_whether_replay_pays_is_what_the_page_says() -> None:
    report = importlib.import_module("when_it_pays_report")
    page = (ROOT / "docs" / "when-replay-pays.md").read_text()
    dots = report.dots()
    assert "\n".join(report.table(dots)) in page, "python benchmarks/when_it_pays_report.py"
    assert report.verdict(dots) in " ".join(page.split())
    assert "\n".join(report.study.by_rate(report.study.finished(), "topics")) in page


def test_what_the_readme_says_of_the_preset_and_of_the_defaults_was_measured() -> None:
    report = importlib.import_module("when_it_pays_report")
    study, readme = report.study, " ".join((ROOT / "README.md").read_text().split())
    done = study.finished()
    ratio = importlib.import_module("updates_per_batch")
    rows = [*study.headline(done), *ratio.headline(ratio.finished())]
    assert "\n".join(rows) in (ROOT / "README.md").read_text()
    shares = [saving.share for task in study.AGAIN for saving in study.savings_of(done, task)["sample_efficient"]]
    shares += [saving.share for task in ratio.FIRST for saving in ratio.savings_of_preset(ratio.finished(), task)]
    assert f"with {1 / np.median(shares):.1f} times fewer completions: the median of {len(shares)} runs" in readme
    savings = [
        (study.TASKS[task], each) for task in study.AGAIN for each in study.savings_of(done, task)["sample_efficient"]
    ]
    savings += [
        (study.TASKS[task], each) for task in ratio.FIRST for each in ratio.savings_of_preset(ratio.finished(), task)
    ]
    gaps = [(each.stock.generated - each.arm.generated) / task.accuracy_every for task, each in savings]
    assert sum(np.isinf(gap) for gap in gaps) == 1, "never"
    assert sum(0 <= gap < 1 for gap in gaps) == 3, "less than from one measurement to the next"
    of_defaults = {dot.task: dot for dot in report.dots() if dot.arm == "defaults"}
    stuck = sorted(dot.gain for dot in of_defaults.values() if dot.unsolved >= report.STUCK)
    assert len(stuck) == 4
    assert stuck[0] < 0.05
    assert (
        f"on three of four toy tasks like this they gained {stuck[1]:.2f} to {stuck[-1]:.2f} of the reward" in readme
    )
    assert [dot.saves for dot in of_defaults.values() if dot.is_real] == [False] * 5
    assert "on none of five tasks did they save completions on every seed" in readme


def test_the_page_tells_on_how_many_seeds_of_the_study_the_reward_fell() -> None:
    study = importlib.import_module("when_it_pays")
    ends: dict[str, dict[int, float]] = {"stock": {}, "stock at 4e-5": {}}
    for run, lines in study.finished().items():
        if run.task == "topics" and run.arm in ends and run.seed != study.PILOT:
            ends[run.arm][run.seed] = lines[-1]["reward"] / max(line["reward"] for line in lines[1:])
    fallen = {arm: [seed for seed, share in shares.items() if share < 0.5] for arm, shares in ends.items()}
    assert fallen == {"stock": [2], "stock at 4e-5": []}
    page = " ".join((ROOT / "docs" / "when-replay-pays.md").read_text().split())
    assert f"On one of {len(ends['stock'])} seeds" in page
