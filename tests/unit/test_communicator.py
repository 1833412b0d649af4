"""What is said to other processes, with a scope that is made up here: who counts, and what becomes of errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import PAD, SIZE, make_batch, rows_of
from buffers import group_of
from sampling import whole

from trl_replay import BatchError, SeamError
from trl_replay.batch.compose import cut
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.counters import Tally
from trl_replay.decision import Admitted, Decision
from trl_replay.distributed.communicator import Communicator
from trl_replay.distributed.row_layout import MISSING
from trl_replay.fields import FieldTable
from trl_replay.loss.off_policy_stats import OffPolicyStats
from trl_replay.progress import Clock, KeptErrors
from trl_replay.protocols import Agreement, Arrival
from trl_replay.strategies.storages import CpuStorage
from trl_replay.tasks import Tasks

FIELDS = FieldTable(PAD)


class Scope:
    """Every process does what this one does; `others` say something else."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.others: Any = None
        self.told: list[tuple[Any, str]] = []

    def share(self, columns: Any) -> Any:
        if self.ranks == 1:
            return columns
        return {
            name: np.concatenate([column + 9 * rank if name == "row" else column for rank in range(self.ranks)])
            for name, column in columns.items()
        }

    def agree(self, vector: Any, error: str) -> Agreement:
        self.told.append((vector, error))
        vectors, errors = [vector] * self.ranks, [error] * self.ranks
        if self.others is not None:
            vectors[1:], errors[1:] = zip(*(self.others(vector, error) for _ in range(1, self.ranks)), strict=True)
        return Agreement(np.array(vectors), list(errors))

    def admit(self, table: Any, arrivals: Any, mine: Any) -> Any:
        return {arrival.serial: [mine[arrival.serial]] for arrival in arrivals}

    def fetch(self, requests: Any, load: Any) -> Any:
        return {request.serial: load(request.serial) for request in requests}


class Speaking:
    """A communicator of `ranks` processes over a buffer with the serials 0 and 1."""

    def __init__(self, ranks: int = 1, rank: int = 0, storage: Any = None) -> None:
        self.scope = Scope(ranks)
        self.buffer = ReplayBuffer(50, storage or CpuStorage(), Limits())
        offer(self.buffer, 0, 1)
        self.buffer.receive({serial: group_of(100) for serial in (0, 1)})
        self.errors = KeptErrors(alone=ranks == 1)
        self.tasks = Tasks()
        self.tasks.begin([{"prompt": f"{number // SIZE}="} for number in range(9)], 9 * rank, SIZE)
        components: Any = SimpleNamespace(
            buffer=self.buffer,
            scope=self.scope,
            fields=FIELDS,
            tasks=self.tasks,
            num_generations=SIZE,
            processes=ranks,
            clock=Clock(),
            errors=self.errors,
        )
        self.say = Communicator(components, OffPolicyStats(), rank)


def offer(buffer: ReplayBuffer, *serials: int) -> None:
    columns = {"serial": np.array(serials), "keys": np.array([buffer.keyset(frozenset())] * len(serials))}
    buffer.offer(columns, lambda table: table.serial, np.random.default_rng(0))


def batch() -> dict[str, Any]:
    return make_batch([[(2, 3), (2, 1), (2, 2)]] * 3, [], 0, [True] * 3)


def test_a_batch_is_described_from_this_processs_first_row_on() -> None:
    speaking = Speaking(ranks=2, rank=1)
    speaking.errors.first = first = OSError("kept")
    rows = speaking.say.share(batch(), 9, None)
    assert speaking.errors.first is first, "it waits for the others"
    assert (rows.first, rows.count, rows.size) == (9, 9, SIZE)
    assert rows.columns["lengths"].tolist() == [3, 1, 2] * 6
    assert len(set(rows.columns["prompt"].tolist())) == 3


def test_a_batch_of_other_rows_than_were_asked_for_is_refused() -> None:
    speaking = Speaking()
    speaking.tasks.of_rows = speaking.tasks.of_rows[:6]
    with pytest.raises(SeamError, match="was to generate for 6 rows, and its batch holds 9"):
        speaking.say.share(batch(), 9, None)


def test_a_batch_that_can_not_be_described_is_shared_blank_with_its_error() -> None:
    speaking = Speaking(ranks=2)
    rows = speaking.say.share({**batch(), "mystery": torch.zeros(9)}, 9, None)
    assert isinstance(speaking.errors.first, BatchError)
    assert rows.columns["lengths"].tolist() == [0] * 18
    with pytest.raises(BatchError):
        Speaking().say.share({**batch(), "mystery": torch.zeros(9)}, 9, None)
    rows = Speaking().say.share(None, 9, None)
    assert rows.columns["row"].tolist() == list(range(9))


def test_groups_without_a_place_are_told_by_their_serials() -> None:
    speaking = Speaking()
    speaking.buffer._overflow = {7: group_of(50), 0: group_of(50)}
    rows = speaking.say.share(batch(), 9, None)
    assert rows.overflowed() == [0, 7]


def test_counters_of_all_processes_are_summed_and_decisions_counted_once() -> None:
    speaking = Speaking(ranks=2)
    rows = speaking.say.share(batch(), 9, None)
    speaking.scope.others = lambda vector, error: (vector, error)
    decision = Decision(Tally(groups=6, replaced=2), sampled=whole([0, 4], [1, 0], size=SIZE))
    agreed = speaking.say.agree(rows, lambda: decision)
    total = agreed.total
    assert agreed.decision is decision
    assert (total["groups"], total["replaced"]) == (12, 4), "here the other one says the same"
    assert total["size"] == 4
    assert total["bytes"] == 2 * speaking.buffer.nbytes
    assert agreed.replaced == ([True] * 3 + [False] * 6) * 2

    following = Speaking(ranks=2, rank=1)
    following.scope.share = lambda columns: {**columns, "row": np.arange(18)}  # type: ignore[method-assign]
    rows = following.say.share(batch(), 9, None)
    total = following.say.agree(rows, lambda: Decision(Tally(groups=6))).total
    assert (total["groups"], total["size"]) == (0, 0), "the first of those that share a buffer counts for all"
    assert total["bytes"] == 2 * following.buffer.nbytes


def unlucky() -> Decision:
    raise ZeroDivisionError("no luck")


def test_a_kept_error_stops_all_processes_before_what_fails_now() -> None:
    speaking = Speaking(ranks=2)
    rows = speaking.say.share(batch(), 9, None)
    speaking.errors.keep(OSError("before"))
    with pytest.raises(OSError, match="before"):
        speaking.say.agree(rows, unlucky)
    assert speaking.errors.first is None
    speaking.say.agree(rows, Decision)


def test_an_error_stops_all_processes_and_takes_back_what_was_admitted() -> None:
    speaking = Speaking(ranks=2)
    offer(speaking.buffer, 2)
    rows = speaking.say.share(batch(), 9, None)
    with pytest.raises(ZeroDivisionError, match="no luck") as caught:
        speaking.say.agree(rows, unlucky, due=[2])
    assert speaking.scope.told[0][1] == "ZeroDivisionError: no luck"
    assert "Replay stops on all processes. rank 0: ZeroDivisionError" in caught.value.__notes__[0]
    assert speaking.buffer.table.serial.tolist() == [0, 1]

    speaking.scope.others = lambda vector, error: (vector, "OSError: there")
    with pytest.raises(SeamError, match=r"Replay stops on all processes\. rank 1: OSError: there"):
        speaking.say.agree(rows, Decision)
    alone = Speaking()
    rows = alone.say.share(batch(), 9, None)
    with pytest.raises(ZeroDivisionError) as caught:
        alone.say.agree(rows, unlucky)
    assert not getattr(caught.value, "__notes__", []), "one process has nobody to tell"


def moved(speaking: Speaking) -> tuple[Any, dict[int, Any]]:
    """Admits serial 2 and fetches serial 1."""
    offer(speaking.buffer, 2)
    rows = speaking.say.share(batch(), 9, None)
    (group,) = cut(batch(), FIELDS, [rows_of(0)])
    admitted = Admitted([Arrival(2, np.array([1]))], {2: group})
    return group, speaking.say.move(
        rows, Decision(admitted=admitted, sampled=whole([0], [1], [1], [1], [1.0], size=1))
    )


def test_admitted_payload_goes_into_the_buffer_and_drawn_payload_comes_out() -> None:
    speaking = Speaking()
    group, fetched = moved(speaking)
    assert torch.equal(speaking.buffer.load(2).tensors["completion_ids"], group.tensors["completion_ids"])
    assert list(fetched) == [1]
    assert fetched[1].nbytes == 100


class Refusing(CpuStorage):
    """Neither takes nor gives what comes after the first two groups."""

    def put(self, serial: int, group: Any) -> None:
        if serial > 1:
            raise OSError("disk full")
        super().put(serial, group)


def test_a_storage_that_fails_stops_one_process_at_once_and_leaves_no_entry_without_payload() -> None:
    speaking = Speaking(storage=Refusing())
    with pytest.raises(OSError, match="disk full"):
        moved(speaking)
    assert speaking.buffer.table.serial.tolist() == [0, 1]


def test_on_several_processes_it_is_kept_for_the_next_batch_and_nobody_waits() -> None:
    speaking = Speaking(ranks=2, storage=Refusing())
    _, fetched = moved(speaking)
    assert isinstance(speaking.errors.first, OSError)
    assert speaking.buffer.table.serial.tolist() == [0, 1, 2], "the table stays the same on all"
    assert fetched[1].nbytes == 100

    def lost(serial: int) -> Any:
        raise KeyError(serial)

    first = speaking.errors.first
    speaking.buffer.load = lost  # type: ignore[method-assign]
    rows = Speaking(ranks=2).say.share(batch(), 9, None)
    fetched = speaking.say.move(rows, Decision(sampled=whole([0], [1], [1], [1], [1.0], size=1)))
    assert fetched == {1: MISSING}
    assert speaking.errors.first is first, "the first error counts"
