"""Messages of all scopes in `agree`: an error's text travels only where there is one."""

import threading

import numpy as np
import pytest
import torch

from trl_replay.distributed.communicator import join_errors
from trl_replay.strategies.scopes import ERROR_BYTES, Collectives, Scope, UnreadableError


class Gathering(Collectives):
    """One of several threads that stand for processes."""

    def __init__(self, rank, ranks, rows, barrier):
        super().__init__(None)
        self.rank, self.ranks, self._rows, self._barrier = rank, ranks, rows, barrier

    def all_gather(self, verb, mine):
        """Every thread's bytes."""
        self._rows[self.rank] = mine.copy()
        self._barrier.wait(10)
        gathered = np.stack(self._rows)
        self._barrier.wait(10)
        self.received[verb] += gathered.nbytes - mine.nbytes
        return gathered


def together(errors):
    """The result of one `agree` on each of several processes, and the bytes that it received."""
    ranks = len(errors)
    rows = [None] * ranks
    barrier = threading.Barrier(ranks)
    found = [None] * ranks

    def speak(rank):
        def run():
            scope = Scope(None)
            scope._collectives = Gathering(rank, ranks, rows, barrier)
            found[rank] = scope.agree(np.array([rank, 0.5]), errors[rank]), scope.received["agree"]

        return run

    threads = [threading.Thread(target=speak(rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_without_an_error_only_numbers_travel():
    for agreement, received in together(["", "", ""]):
        assert agreement.vectors.tolist() == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
        assert agreement.errors == ["", "", ""]
        assert received == 2 * 3 * 8, "two other processes, two numbers and a length of 8 bytes each"


def test_of_several_processes_that_fail_all_are_named():
    assert join_errors(["", "no luck", "no room"]) == "rank 1: no luck; rank 2: no room"


@pytest.mark.parametrize("errors", [["", "no luck", ""], ["a", "", "Zürich: bad"], ["x" * 5000, "", "y"]])
def test_every_process_hears_every_error_in_its_own_words(errors):
    for agreement, received in together(errors):
        assert agreement.vectors[:, 0].tolist() == [0.0, 1.0, 2.0]
        assert agreement.errors == [text[:ERROR_BYTES] for text in errors]
        longest = max(len(text.encode()[:ERROR_BYTES]) for text in errors)
        assert received == 2 * (3 * 8 + longest)


def test_one_process_says_nothing():
    scope = Scope(None)
    agreement = scope.agree(np.array([1.0]), "no luck")
    assert agreement.vectors.tolist() == [[1.0]]
    assert agreement.errors == ["no luck"]
    assert scope.received["agree"] == 0


class Damaging(Collectives):
    """Stands for a rank that gets other bytes than were sent."""

    def __init__(self):
        super().__init__(None)
        self.rank, self.ranks = 0, 2

    def _all_to_all(self, outgoing, out_sizes, in_sizes):
        sizes = out_sizes == [1, 1]
        return torch.tensor([0, 9]) if sizes else torch.zeros(9, dtype=torch.uint8)


def test_what_arrives_and_can_not_be_read_is_an_error_once_no_rank_waits():
    with pytest.raises(UnreadableError, match="groups that other ranks sent can't be read"):
        Damaging().exchange("fetch", [[], []], lambda serial: None, crossing=True)
