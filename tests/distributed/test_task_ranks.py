"""One prompt with several tasks on two processes: groups know theirs, straddling ones and resumed ones included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

from task_ranks import LAYOUTS, SCOPES
from two_ranks import run_two_ranks

CASES = [f"{scope} {layout}" for scope in SCOPES for layout in LAYOUTS]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: Any) -> Any:
    """What both ranks showed."""
    script = Path(__file__).parent / "ranks" / "task_ranks.py"
    return run_two_ranks(script, tmp_path_factory.mktemp("tasks"), 400)


@pytest.mark.parametrize("case", [*CASES, *(f"{case} resumed" for case in CASES), "environments"])
def test_66_on_two_processes_no_answer_to_one_task_is_trained_as_anothers(ranks: Any, case: str) -> None:
    first, second = (rank[case] for rank in ranks)
    assert first == second, "of the entries that both ranks share"
    assert first["pairs"] > 0
    assert first["crossed"] == []
    tasks = dict(zip(first["tasks"], first["labels"], strict=True))
    assert len(tasks) == len(set(first["labels"])) == first["metric"] > 1


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_as_the_one_that_went_on(ranks: Any, case: str) -> None:
    for rank in ranks:
        for name in ("tasks", "labels", "weights"):
            assert rank[f"{case} resumed"][name] == rank[case][name], name


def test_every_layout_and_scope_gives_a_label_one_task(ranks: Any) -> None:
    found: dict[str, set[int]] = {}
    for case in CASES:
        for task, label in zip(ranks[0][case]["tasks"], ranks[0][case]["labels"], strict=True):
            found.setdefault(label, set()).add(task)
    assert all(len(tasks) == 1 for tasks in found.values())
