"""One prompt with several tasks on two processes: groups know theirs, straddling ones and resumed ones included."""

import pytest
from task_ranks import LAYOUTS

CASES = [*LAYOUTS, "credit"]


@pytest.mark.parametrize("case", [*CASES, *(f"{case} resumed" for case in CASES), "environments"])
def test_66_on_two_processes_no_answer_to_one_task_is_trained_as_anothers(launches, case):
    first, second = launches(2, case)
    for name in ("pairs", "crossed", "tasks", "labels", "metric", "weights"):
        assert first[name] == second[name], f"{name} of the entries that both ranks share"
    assert first["pairs"] > 0
    assert first["crossed"] == []
    tasks = dict(zip(first["tasks"], first["labels"], strict=True))
    assert len(tasks) == len(set(first["labels"])) == first["metric"] > 1


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_as_the_one_that_went_on(launches, case):
    for resumed, whole in zip(launches(2, f"{case} resumed"), launches(2, case), strict=True):
        for name in ("tasks", "labels", "weights"):
            assert resumed[name] == whole[name], name


def test_every_layout_gives_a_label_one_task(launches):
    found = {}
    for case in CASES:
        first, _ = launches(2, case)
        for task, label in zip(first["tasks"], first["labels"], strict=True):
            found.setdefault(label, set()).add(task)
    assert all(len(tasks) == 1 for tasks in found.values())
