"""AsyncGRPOTrainer on two processes: the main one decides, and both train on it."""

from functools import partial

import pytest

pytest.importorskip("trl.experimental.async_grpo", reason="this release does not ship the trainer")


@pytest.fixture(scope="module")
def ranks(launches):
    """The results of both ranks in a case."""
    return partial(launches, 2)


def test_with_nothing_to_replay_two_processes_train_as_in_stock(ranks):
    for stock, idle in zip(ranks("stock"), ranks("idle"), strict=True):
        assert stock["text"] == idle["text"] == ""
        assert len(stock["losses"]) == 6
        assert (stock["losses"], stock["weights"]) == (idle["losses"], idle["weights"])


def test_the_main_process_decides_and_both_train_on_it(ranks):
    main, other = ranks("replay")
    assert main["text"] == other["text"] == ""
    assert main["weights"] == other["weights"]
    assert main["counters"]["replaced"] > 0
    assert main["size"] > 0
    assert (other["size"], other["update"]) == (0, 6)
    assert "the main process reads the queue" in other["explains"]


def test_98_the_main_process_alone_is_filled_from_a_file(ranks):
    before, (main, other) = ranks("replay"), ranks("warms")
    assert main["text"] == other["text"] == ""
    assert (main["size"], other["size"]) == (before[0]["size"], 0)
    assert main["counters"]["replaced"] > 0
    assert main["weights"] == other["weights"]


def test_181_a_file_that_can_not_be_read_stops_both(ranks):
    """The other one waited for samples that never come."""
    main, other = ranks("warms from a torn file")
    assert (main["type"], other["type"]) == ("ReplayError", "ReplayError")
    assert "lacks completion" in main["text"]
    assert "rank 0: ReplayError: Row 0 of" in other["text"]


def test_both_write_and_read_checkpoints(ranks):
    saved, resumed = ranks("saves"), ranks("resumes")
    assert [rank["text"] for rank in (*saved, *resumed)] == [""] * 4
    assert [rank["update"] for rank in resumed] == [8, 8]
    assert resumed[0]["weights"] == resumed[1]["weights"]
    assert resumed[0]["counters"]["replaced"] > 0


def test_settings_that_differ_are_told_on_both(ranks):
    for rank in ranks("differs"):
        assert rank["type"] == "ConfigurationError"
        assert "replay_max_age is 3 on rank 0 and 4 on rank 1" in rank["text"]
