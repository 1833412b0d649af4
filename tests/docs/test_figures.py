"""The figures in the documentation are those of the results beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import learning_report

    yield learning_report
    del sys.modules["learning_report"]


@pytest.mark.parametrize(
    ("page", "table"), [("README.md", "overview"), ("docs/evidence.md", "overview"), ("docs/evidence.md", "details")]
)
def test_what_the_learning_benchmark_found_is_what_the_pages_say(report: Any, page: str, table: str) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text())
    assert not results["quick"]
    text = (ROOT / page).read_text()
    for row in getattr(report, table)(results):
        assert row in text, f"{page} lacks this row: run benchmarks/learning_report.py, which prints all"


def test_the_demo_trains_at_the_rates_that_the_benchmark_chose() -> None:
    from combination_lock import LEARNING_RATES

    results = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text())
    chosen = results["tasks"]["lock"]["chosen"]
    assert {"stock": chosen["stock"], "replay": chosen["corrected"]} == LEARNING_RATES


def test_what_the_benchmark_of_generating_again_found_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import refill

    results = json.loads((ROOT / "benchmarks" / "results" / "refill.json").read_text())
    assert not results["quick"]
    assert list(results["tasks"]) == list(refill.PROTOCOLS)
    page = (ROOT / "docs" / "evidence.md").read_text()
    for task, result in results["tasks"].items():
        assert "\n".join(refill.table(task, result, results["arms"])) in page


def test_what_the_benchmark_of_the_papers_methods_found_is_what_the_page_and_the_cards_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import papers_report
    from trl_replay_papers import METHODS, card

    results = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text())
    assert not results["quick"]
    page = (ROOT / "docs" / "evidence.md").read_text()
    for question, lines in papers_report.tables(results).items():
        assert "\n".join(lines) in page, f"python benchmarks/papers_report.py --write, for {question}"
    for name in METHODS:
        told = " ".join(card(name).sections["Measured here"].split())
        assert told == papers_report.measured(results, name)


def test_what_large_buffers_cost_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import overhead

    results = json.loads((ROOT / "benchmarks" / "results" / "overhead_tables.json").read_text())
    table = "\n".join(overhead.size_table(results["checks"]))
    assert table in (ROOT / "docs" / "evidence.md").read_text()


def test_what_the_real_model_showed_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import real_model

    steps = real_model.steps_of(ROOT / "benchmarks" / "results" / "real_model.jsonl")
    assert {run.task for run in steps} == set(real_model.TASKS)
    assert "\n".join(real_model.table(steps)) in (ROOT / "docs" / "evidence.md").read_text()


def test_what_was_measured_of_many_ranks_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import ranks

    results = json.loads((ROOT / "benchmarks" / "results" / "ranks.json").read_text())
    page = (ROOT / "docs" / "scopes.md").read_text()
    shared = [line for line in results["simulated"] if line["scope"] != "process"]
    assert {line["ranks"] for line in shared} == set(ranks.RANKS)
    for table in (ranks.traffic(shared), ranks.growth(shared), ranks.real_endings(results["real"]["16"])):
        assert "\n".join(table) in page, "python benchmarks/ranks.py prints it"
    assert ranks.failed(results) == []
    assert sorted({line["ranks"] for line in results["compared"]}) == [2, 4, 8]
    assert all(line["steps"] == 10 for line in results["compared"])
    assert results["real"]["16"]["patterns"] == 50


def test_what_long_completions_cost_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import long

    results = json.loads((ROOT / "benchmarks" / "results" / "long.json").read_text())
    assert not results["quick"]
    assert (results["tokens"], results["group"]) == (long.TOKENS, long.GENERATIONS)
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert "\n".join(long.table(results)) in page, "python benchmarks/long.py prints it"
