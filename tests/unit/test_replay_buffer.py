"""The buffer: capacity in groups and in bytes, which entries are eligible, and which leave; by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from buffers import Ledger, filled, group_of

from trl_replay import ReplayError, StorageFullError
from trl_replay.buffer.replay_buffer import Limits, ReplayBuffer
from trl_replay.fields import PIXELS
from trl_replay.strategies.storages import CpuStorage

TEXT = frozenset({"prompt_ids", "completion_ids"})


def by_score(table: Any) -> Any:
    return table.score


def stored(capacity: int = 50, limits: Limits | None = None, count: int = 4, **columns: Any) -> ReplayBuffer:
    """A buffer that was offered entries with serials 0, 1, …, of score 1 each."""
    buffer = ReplayBuffer(capacity, Ledger(), limits or Limits())
    offer(buffer, count, **columns)
    for name in ("uses", "last_used"):
        if name in columns:
            buffer.table.writable(name)[:] = columns[name]
    return buffer


def offer(buffer: ReplayBuffer, count: int, **columns: Any) -> tuple[list[int], int]:
    first = columns.pop("first", 0)
    keys = [buffer.keyset(keys) for keys in columns.pop("keysets", [TEXT] * count)]
    made = {"serial": np.arange(first, first + count), "score": np.ones(count), "keys": np.array(keys, np.int64)}
    made |= {name: np.asarray(values) for name, values in columns.items()}
    serials, evicted = buffer.offer(made, by_score, np.random.default_rng(first))
    buffer.receive(dict.fromkeys(serials))
    return serials, evicted


def serials(buffer: ReplayBuffer) -> list[int]:
    return sorted(buffer.table.serial.tolist())


# offering


def test_newcomers_get_tags_their_first_score_and_no_use() -> None:
    buffer = stored(capacity=500, count=200, score=np.arange(200.0))
    table = buffer.table
    assert table.first_score.tolist() == table.score.tolist()
    assert set(table.last_used.tolist()) == {-1}
    assert set(table.uses.tolist()) == {0}
    assert float(table.tag.min()) > 0
    assert float(table.tag.max()) <= 1
    assert len(set(table.tag.tolist())) == 200
    table.writable("score")[:] = 7.0
    offer(buffer, 2, first=200, score=[1.0, 2.0])
    assert table.first_score[-2:].tolist() == [1.0, 2.0]
    assert table.first_score[:200].tolist() == list(range(200)), "earlier ones keep theirs"


def test_what_stayed_of_the_newcomers_and_how_many_others_left_is_told() -> None:
    buffer = stored(capacity=3, count=3, score=[5.0, 1.0, 3.0])
    assert offer(buffer, 3, first=3, score=[4.0, 0.5, 2.0]) == ([3], 1)
    assert serials(buffer) == [0, 2, 3]
    assert offer(buffer, 1, first=6, score=[0.1]) == ([], 0)
    assert offer(buffer, 0, first=7, score=[]) == ([], 0)


def test_peers_of_a_prompt_are_counted_as_they_come_and_go() -> None:
    buffer = stored(capacity=3, count=3, prompt=[5, 7, 5], score=[3.0, 2.0, 1.0])
    assert dict(zip(buffer.table.serial.tolist(), buffer.table.peers.tolist(), strict=True)) == {0: 2, 1: 1, 2: 2}
    offer(buffer, 1, first=3, prompt=[7], score=[9.0])
    table = buffer.table
    assert dict(zip(table.serial.tolist(), table.peers.tolist(), strict=True)) == {0: 1, 1: 2, 3: 2}
    assert dict(zip(table.serial.tolist(), table.newer.tolist(), strict=True)) == {0: 0, 1: 1, 3: 0}


# capacity


def test_over_the_bytes_the_lowest_keep_ranks_leave_until_the_rest_fits() -> None:
    row = ReplayBuffer(1, CpuStorage(), Limits()).table.row_bytes
    with pytest.warns(UserWarning, match=r"replay_max_bytes .* is reached with 3 .*A group costs .* about 2 fit"):
        buffer = filled(3000 + 3 * row, [1000, 800, 1000, 1500], [3.0, 1.0, 1.0, 2.0])
    assert sorted(buffer.table.serial.tolist()) == [0, 3], "the older of two equal ranks left first, then the other"
    assert buffer.nbytes <= 3000 + 3 * row


def test_a_newcomer_of_low_rank_leaves_at_once() -> None:
    row = ReplayBuffer(1, CpuStorage(), Limits()).table.row_bytes
    with pytest.warns(UserWarning, match="a group costs|A group costs"):
        buffer = filled(2000 + 2 * row, [1000, 1000, 600], [3.0, 2.0, 1.0])
    assert buffer.table.serial.tolist() == [0, 1]


def test_where_bytes_and_groups_are_both_too_many_the_stricter_limit_decides() -> None:
    """One entry less would fit into the bytes, but the buffer has room for two groups."""
    buffer = stored(count=5, nbytes=[100, 100, 100, 100, 1000], score=[5.0, 4.0, 3.0, 2.0, 1.0])
    buffer.capacity, buffer.max_bytes = 2, 500 + 5 * buffer.table.row_bytes
    assert buffer.trim(by_score) == 3, "without a warning: bytes are not what evicts most"
    assert serials(buffer) == [0, 1]


def test_bytes_that_just_fit_evict_nobody() -> None:
    buffer = stored(count=3, nbytes=[100, 100, 100])
    buffer.max_bytes = 300 + 3 * buffer.table.row_bytes
    assert buffer.trim(by_score) == 0
    buffer.max_bytes -= 1
    with pytest.warns(UserWarning, match=r"is reached with 2 of replay_buffer_size=50"):
        assert buffer.trim(by_score) == 1
    assert serials(buffer) == [1, 2]
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes])).tolist() == [True]
    assert buffer.fits(np.array([buffer.max_bytes - buffer.table.row_bytes + 1])).tolist() == [False]
    buffer.max_bytes = None
    assert buffer.fits(np.array([10**15, 1])).tolist() == [True, True]


def test_a_capacity_that_just_suffices_evicts_nobody() -> None:
    buffer = stored(count=3)
    buffer.capacity = 3
    assert buffer.trim(by_score) == 0
    buffer.capacity = 2
    assert buffer.trim(by_score) == 1
    assert serials(buffer) == [1, 2], "of equal scores the older leaves"


# eligible


def eligible(buffer: ReplayBuffer, update: int, keys: frozenset[str] = TEXT) -> tuple[list[int], list[str]]:
    rows, reasons = buffer.eligible(update, keys)
    return buffer.table.serial[rows].tolist(), reasons


def test_an_entry_is_eligible_one_update_after_its_generation() -> None:
    buffer = stored(update=[3, 4, 5, 6])
    assert eligible(buffer, 5) == ([0, 1], ["too new"])


def test_the_limits_include_their_value_and_are_named() -> None:
    steps, uses, last = [0, 6, 7, 7], [0, 0, 2, 3], [-1, -1, 7, 8]
    buffer = stored(limits=Limits(max_age=4, max_uses=3), update=steps, uses=uses)
    assert eligible(buffer, 10) == ([1, 2], ["replay_max_age", "replay_max_uses"])
    buffer = stored(limits=Limits(cooldown=3), update=[0] * 4, uses=uses, last_used=last)
    assert eligible(buffer, 10) == ([0, 1, 2], ["replay_cooldown"])
    assert eligible(stored(update=[0] * 4), 10) == ([0, 1, 2, 3], [])


def test_a_buffer_below_its_least_size_gives_nothing() -> None:
    assert eligible(stored(limits=Limits(min_size=5), update=[0] * 4), 9) == ([], ["replay_min_size"])
    assert eligible(stored(limits=Limits(min_size=4), update=[0] * 4), 9)[0] == [0, 1, 2, 3]


def test_an_entry_must_restore_every_key_and_brings_images_only_where_they_fit() -> None:
    reference, pictured = TEXT | {"ref_per_token_logps"}, TEXT | {PIXELS}
    buffer = stored(update=[0] * 4, keysets=[TEXT, reference, pictured, TEXT])
    assert eligible(buffer, 9) == ([0, 1, 3], ["has images, the batch none"])
    assert eligible(buffer, 9, TEXT | {PIXELS})[0] == [0, 1, 2, 3], "those without images fit in any batch"
    told = ["lacks a tensor", "has images, the batch none"]
    assert eligible(buffer, 9, reference) == ([1], told)


# leaving


def test_entries_that_no_limit_will_let_through_again_are_retired() -> None:
    buffer = stored(limits=Limits(max_age=4, max_uses=3), update=[5, 6, 9, 9], uses=[0, 2, 3, 4])
    assert buffer.retire(10) == 3
    assert serials(buffer) == [1]
    assert buffer.storage.serials == {1}
    assert stored(limits=Limits(cooldown=3), update=[0] * 4, uses=[9] * 4, last_used=[9] * 4).retire(10) == 0


def test_using_an_entry_is_counted_and_dated() -> None:
    buffer = stored()
    buffer.use(np.array([1, 3]), 7)
    buffer.use(np.array([3]), 9)
    assert buffer.table.uses.tolist() == [0, 1, 0, 2]
    assert buffer.table.last_used.tolist() == [-1, 7, -1, 9]


def test_entries_leave_by_serial_by_prompt_and_by_a_key_that_they_hold() -> None:
    buffer = stored(count=6, prompt=[1, 1, 2, 3, 3, 4], keysets=[TEXT] * 5 + [TEXT | {"ref_per_token_logps"}])
    assert buffer.withdraw([2, 99]) == 1
    assert buffer.withdraw([]) == 0
    assert buffer.forget_prompts(np.array([3, 77])) == 2
    assert buffer.forget_prompts(np.array([], np.int64)) == 0
    assert buffer.forget_with("ref_per_token_logps") == 1
    assert serials(buffer) == [0, 1]
    assert buffer.storage.serials == {0, 1}
    buffer.clear()
    assert (len(buffer), buffer.storage.serials) == (0, set())


# payload


class Small(CpuStorage):
    """Has room for two groups."""

    def put(self, serial: int, group: Any) -> None:
        if self.nbytes > 100:
            raise StorageFullError("no room")
        super().put(serial, group)


def receiving() -> ReplayBuffer:
    buffer = ReplayBuffer(50, Small(), Limits())
    made = {"serial": np.arange(3), "score": np.ones(3), "keys": np.zeros(3, np.int64)}
    buffer.keyset(TEXT)
    buffer.offer(made, by_score, np.random.default_rng(0))
    return buffer


def test_what_the_storage_has_no_room_for_is_kept_until_it_is_withdrawn() -> None:
    buffer = receiving()
    with pytest.warns(UserWarning, match="no room for further groups"):
        buffer.receive({serial: group_of(80 + serial) for serial in range(3)})
    assert buffer.overflow == [2]
    assert buffer.held() == [0, 1, 2]
    assert buffer.nbytes == 80 + 81 + 82 + 3 * buffer.table.row_bytes
    copy = buffer.load(2)
    copy.tensors["x"][:] = 9
    assert buffer.load(2).nbytes == 82
    assert int(buffer.load(2).tensors["x"].max()) == 0, "what is handed out is a copy"
    assert buffer.withdraw([2]) == 1
    assert buffer.overflow == []
    assert buffer.nbytes == 80 + 81 + 2 * buffer.table.row_bytes


def test_of_a_checkpoint_it_is_told_and_not_kept() -> None:
    buffer = receiving()
    with pytest.warns(UserWarning, match="no room for further groups"):
        buffer.receive({serial: group_of(80) for serial in range(3)}, keep=False)
    assert (buffer.unrestored, buffer.overflow, buffer.held()) == ([2], [], [0, 1])


def test_entries_whose_payload_did_not_come_are_taken_back() -> None:
    buffer = receiving()
    buffer.receive({1: group_of(20)})
    buffer.withdraw_missing([0, 1])
    assert serials(buffer) == [1, 2], "the third was not expected here"


def test_what_is_loaded_is_what_was_received() -> None:
    buffer = receiving()
    buffer.receive({0: group_of(20)})
    assert torch.equal(buffer.load(0).tensors["x"], group_of(20).tensors["x"])


# checkpoints


def test_columns_come_back_with_keys_that_are_numbered_anew() -> None:
    pictured = TEXT | {PIXELS}
    saved = stored(count=3, keysets=[TEXT, pictured, TEXT], score=[1.0, 2.0, 3.0], prompt=[4, 4, 5])
    saved.table.add_column("gone", fill=1.0)
    state = saved.state_dict()
    saved.table.writable("score")[:] = 0.0
    other = ReplayBuffer(50, Ledger(), Limits())
    other.table.add_column("mine", fill=0.5)
    other.keyset(pictured)
    offer(other, 2, first=90)
    other.unrestored = [7]
    other.load_state_dict(state)
    table = other.table
    assert table.serial.tolist() == [0, 1, 2]
    assert table.score.tolist() == [1.0, 2.0, 3.0], "the state is a copy"
    assert table.mine.tolist() == [0.5] * 3
    assert "gone" not in table.names
    assert table.peers.tolist() == [2, 2, 1]
    keysets = other.state_dict()["keysets"]
    assert [keysets[number] for number in table.keys.tolist()] == [TEXT, pictured, TEXT]
    assert (other.storage.serials, other.unrestored, other.held()) == (set(), [], [])


def test_a_set_of_keys_keeps_its_number() -> None:
    buffer = ReplayBuffer(1, Ledger(), Limits())
    assert [buffer.keyset(keys) for keys in (TEXT, frozenset(), TEXT)] == [0, 1, 0]


def test_a_buffer_of_no_session_takes_nothing() -> None:
    with pytest.raises(ReplayError, match=r"of a session only"):
        ReplayBuffer(1, CpuStorage(), Limits()).add([])
