"""Who is missing when a collective fails, by the marks that processes leave: those of the others are made up here."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trl_replay import SeamError
from trl_replay.distributed import whereabouts as module
from trl_replay.distributed.whereabouts import KEY, Whereabouts, in_words


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of torch.distributed, as a launch has it."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = dist.PrefixStore("launch", kept)
    monkeypatch.setattr(module, "store_of_all", lambda: found)
    monkeypatch.setattr(Whereabouts, "_collectives", 0)
    return found


def note(processes: int, error: Exception | None = None) -> str:
    """What an error on rank 0 is told, in the first collective of the second batch."""
    here = Whereabouts(0, processes)
    for verb in ("share", "agree"):
        with here.at(verb, 6):
            pass
    with pytest.raises(type(error or RuntimeError())) as caught, here.at("share", 7):
        raise error or RuntimeError("Connection closed by peer")
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) <= 1
    return "".join(notes)


def leave(store: Any, rank: int, count: int, where: str) -> None:
    store.set(f"{KEY}/{rank}", f"{count} {where}")


def test_a_process_leaves_a_mark_before_each_collective(store: Any) -> None:
    with Whereabouts(1, 3).at("agree", 7):
        assert store.get(f"{KEY}/1") == b"1 `agree` at update 7"
    with Whereabouts(1, 3).at("share", 0):  # another session
        assert store.get(f"{KEY}/1") == b"2 `share` at update 0"


def test_who_has_not_come_is_named_with_where_it_was_last(store: Any) -> None:
    for rank, count in ((1, 3), (2, 2), (3, 4), (5, 2)):  # rank 3 is further, and rank 4 never came to anything
        leave(store, rank, count, "`agree` at update 6" if count == 2 else "`share` at update 7")
    told = note(6)
    assert "Replay failed on rank 0 of 6 in `share` at update 7, to which not all have come." in told
    assert "Missing: rank 2, 5, which came last to `agree` at update 6; rank 4, which came last to none of" in told
    assert "what it printed last tells why" in told


def test_where_all_have_come_nobody_is_missing(store: Any) -> None:
    leave(store, 1, 3, "`share` at update 7")
    assert "to which all have come: another process ended in it, or gave up waiting there" in note(2)


def test_errors_that_are_not_torchs_are_left_alone(store: Any) -> None:
    for error in (SeamError("ours"), KeyError("a plugin's")):
        assert note(2, error) == ""


def test_nobody_is_missing_where_this_process_has_no_memory_left(store: Any) -> None:
    for error in (torch.OutOfMemoryError("this device's"), NotImplementedError("a scope's")):
        assert note(2, error) == ""
    assert "Missing: rank 1" in note(2, dist.DistNetworkError("Broken pipe"))


def test_one_process_leaves_no_mark_and_names_nobody(store: Any) -> None:
    assert note(1) == ""
    assert not store.check([f"{KEY}/0"])


class Gone(dist.Store):
    """A store whose process has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")


class Hanging(dist.Store):
    """A store whose process takes what it is told, and does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.released.wait(60)
        return False


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER", 0.2)
    hanging = Hanging()
    for store in (Gone(), hanging):
        monkeypatch.setattr(module, "_asked_without_waiting", lambda found=store: found)
        assert "Where the others are can't be told: the process that keeps the store" in note(2)
    assert not hanging.released.is_set()
    hanging.released.set()


def test_a_store_in_a_file_would_keep_all_marks_and_gets_none(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.PrefixStore("launch", dist.FileStore(str(tmp_path / "store"), 2))
    monkeypatch.setattr(module, "store_of_all", lambda: store)
    told = note(2)
    assert not store.check([f"{KEY}/0"])
    assert told.endswith("in `share` at update 7. What the others printed last tells why.")


def test_ranks_are_told_by_the_ends_of_their_runs() -> None:
    assert in_words([4]) == "4"
    assert in_words([0, 2, 3, 5, 6, 7, 63]) == "0, 2, 3, 5-7, 63"
