"""Stored rows beside fresh ones, and shaped advantages, on two and three processes: as on one, to the gradient."""

import functools

import pytest
from launches import assert_same_gradients, everywhere
from mixing_ranks import ITERATIONS, LAYOUTS, combinations, register, trained, unregister
from one_rank import told

CASES = [(world, *case) for world in LAYOUTS for case in combinations(world)]


@functools.cache
def alone(folder, name, world, layout):
    """The same script on one process; its scope does not matter there."""
    rows, size = LAYOUTS[world][layout]
    register()
    try:
        return trained(folder, name, "gathered", rows * world, size, 0, 1)
    finally:
        unregister()


@pytest.mark.parametrize(("world", "name", "scope", "layout"), [case for case in CASES if case[2] != "process"])
def test_several_processes_do_what_one_does(launches, tmp_path_factory, world, name, scope, layout):
    ranks = launches(world, f"{name} {scope} {layout}")
    one = alone(tmp_path_factory.getbasetemp() / "mixing", name, world, layout)
    mixed = 0
    for step, expected in enumerate(one["steps"]):
        together = {key: everywhere(ranks, step, key) for key in ("out", "replayed", "advantages_out")}
        assert together["out"] == expected["out"]
        assert together["replayed"] == expected["replayed"]
        assert together["advantages_out"] == pytest.approx(expected["advantages_out"], abs=1e-6), step
        assert [rank["steps"][step]["items"] for rank in ranks] == [expected["items"]] * world
        mixed += sum(expected["replayed"])
    assert mixed > 1 or name in ("zscore", ITERATIONS)
    assert len(one["gradients"]) == (18 if name == ITERATIONS else 6)
    assert (one["counters"]["iterated"] > 10) == (name == ITERATIONS)
    assert_same_gradients(ranks, one)


def test_each_process_mixes_from_a_buffer_of_its_own(launches):
    ranks = launches(2, "joint process whole")
    rows = LAYOUTS[2]["whole"][0]
    for rank in ranks:
        born = set()
        mixed = 0
        for step in rank["steps"]:
            stored = [text for text, flag in zip(step["out"], step["replayed"], strict=True) if flag]
            assert set(stored) <= born, "rows that this process generated"
            mixed += len(stored)
            born |= set(step["fresh"])
        assert 0 < mixed < 6 * rows


def test_an_owner_sends_no_row_that_is_not_taken(launches):
    joint = launches(2, "joint gathered straddling")
    assert sum(rank["received"]["fetch"] for rank in joint) > 0
    for rank in joint:
        assert set(rank["loaded rows"]) == {2}, "of four"
        for step in rank["steps"]:
            assert sum(step["replayed"]) <= 2 * 2, "two rows a slot, two slots a process"


def test_ranks_that_mask_other_rows_stop_together(launches):
    for rank in launches(2, "differing"):
        assert rank["type"] == "SeamError"
        assert "decided differently" in told(rank)
