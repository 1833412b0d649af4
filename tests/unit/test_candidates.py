"""Candidates: how their log-probs become part of them, what is shared of them, and which can be stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import PAD, SIZE, make_batch, rows_of

from trl_replay.batch.compose import cut
from trl_replay.buffer.candidates import (
    STALE,
    Candidate,
    Left,
    PendingGroups,
    StepCarry,
    collect_candidates,
    trainable_sums,
    with_named_rewards,
    with_rewards,
)
from trl_replay.counters import Tally
from trl_replay.fields import STORED_REWARDS, FieldTable
from trl_replay.serialization.wire import packed_size
from trl_replay.testing import make_groups
from trl_replay.types import Group

FIELDS = FieldTable(PAD)
LENGTHS = [3, 1, 2]
KEYS = frozenset({"completion_ids"})


def group(**tensors: Any) -> Group:
    """Three rows of 3, 1 and 2 tokens."""
    made = {key: torch.as_tensor(values) for key, values in tensors.items()}
    return Group(made, KEYS | frozenset(made), np.array([2]), np.array(LENGTHS))


def candidate(records: list[Any] | None = None, serial: int = 7, slot: int = 0, **tensors: Any) -> Candidate:
    rows = slice(slot * SIZE, (slot + 1) * SIZE)
    records = [None] * SIZE if records is None else records
    return Candidate(serial, slot, group(**tensors), KEYS, rows, 0, records)


WIDE = [torch.tensor([-1.0, -2.0, -3.0, 9.0]), torch.tensor([-4.0, 9.0, 9.0, 9.0]), torch.tensor([-5.0, -6.0, 9.0, 9])]
"""Recorded log-probs of the three rows, padded."""


def test_recorded_log_probs_become_part_of_the_group_without_padding() -> None:
    one = candidate(list(WIDE))
    assert one.complete()
    assert one.group is not None
    assert one.group.tensors["old_per_token_logps"].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert "old_per_token_logps" in one.group.keys
    assert one.records == [], "they are not kept twice"
    assert one.complete(), "asked again it is still complete"


def test_a_candidate_that_lacks_a_rows_record_is_not_complete() -> None:
    for missing in range(SIZE):
        one = candidate([None if row == missing else record for row, record in enumerate(WIDE)])
        assert not one.complete()
        assert one.group is not None
        assert "old_per_token_logps" not in one.group.tensors


def test_stocks_own_log_probs_need_no_record() -> None:
    one = candidate(old_per_token_logps=[-1.0] * 6, sampling_per_token_logps=[float("nan"), -2.0] + [-3.0] * 4)
    assert one.complete()
    assert one.group is not None
    assert one.group.tensors["sampling_per_token_logps"].tolist() == [-1.0, -2.0] + [-3.0] * 4, "as the policy"


def test_what_the_sampler_could_not_tell_is_filled_from_the_records() -> None:
    ratio = torch.tensor([float("nan"), 2.0, 3.0, 4.0, 5.0, float("nan")])
    one = candidate(list(WIDE), importance_sampling_ratio=ratio)
    assert one.complete()
    assert one.group is not None
    assert one.group.tensors["importance_sampling_ratio"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 1.0]


def test_rows_that_lie_elsewhere_are_no_reason_to_wait() -> None:
    assert Candidate(7, 0, None, KEYS, slice(0, 0), 0).complete()


def test_log_probs_are_kept_in_the_type_that_was_asked_for() -> None:
    one = candidate(list(WIDE))
    one.logps_dtype = torch.bfloat16
    assert one.complete()
    assert one.group is not None
    assert one.group.tensors["old_per_token_logps"].dtype == torch.bfloat16


def test_sums_leave_out_tokens_that_the_loss_leaves_out() -> None:
    logps = [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0]
    assert trainable_sums(group(old_per_token_logps=logps)).tolist() == [-7.0, -8.0, -48.0]
    tools = group(old_per_token_logps=logps, tool_mask=[1, 0, 1, 1, 0, 0])
    assert trainable_sums(tools).tolist() == [-5.0, -8.0, 0.0]
    cut_off = group(old_per_token_logps=logps, completion_mask=[1, 1, 0, 0, 1, 1])
    assert trainable_sums(cut_off).tolist() == [-3.0, 0.0, -48.0]
    both = group(old_per_token_logps=logps, tool_mask=[1, 0, 1, 1, 0, 1], completion_mask=[1, 1, 0, 0, 1, 1])
    assert trainable_sums(both).tolist() == [-1.0, 0.0, -32.0]


def test_a_masked_token_that_is_not_finite_does_not_matter() -> None:
    logps = [-1.0, float("nan"), -2.0, float("-inf"), -3.0, -4.0]
    sums = trainable_sums(group(old_per_token_logps=logps, tool_mask=[1, 0, 1, 0, 1, 1]))
    assert sums.tolist() == [-3.0, 0.0, -7.0]


def pending(*candidates: Candidate, groups: int = 3) -> PendingGroups:
    rewards = [[1.0, 0.0, 0.0 + number] for number in range(groups)]
    return PendingGroups(make_groups(rewards), list(candidates))


def test_what_is_shared_of_candidates_stands_at_their_rows() -> None:
    whole, partial = candidate(list(WIDE), slot=1), candidate([WIDE[0], None, WIDE[2]], slot=2)
    elsewhere = Candidate(9, 0, None, KEYS, slice(0, 0), 0)
    columns = pending(elsewhere, whole, partial).describe(9)
    assert columns["recorded"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert columns["logps"].tolist() == [0, 0, 0, -6.0, -4.0, -11.0, 0, 0, 0]
    assert whole.group is not None
    assert columns["nbytes"].tolist() == [0, 0, 0, packed_size(whole.group), 0, 0, 0, 0, 0]


def columns(recorded: list[list[int]], logps: list[list[float]] | None = None) -> dict[str, Any]:
    told = [[-1.0] * SIZE] * len(recorded) if logps is None else logps
    return {"recorded": np.array(recorded).ravel(), "logps": np.array(told, float).ravel()}


def test_candidates_of_which_every_row_is_known_and_finite_can_be_stored() -> None:
    waiting = pending(*[candidate(serial=slot, slot=slot) for slot in (0, 1, 2)])
    tally = Tally()
    logps = [[-1.0, -2.0, -3.0], [-1.0, float("-inf"), -3.0], [float("nan")] * 3]
    usable, groups = waiting.admissible(columns([[1, 1, 1], [1, 1, 1], [1, 0, 1]], logps), tally)
    assert [one.serial for one in usable] == [0]
    assert groups is not None
    assert groups.behavior_logps is not None
    assert groups.behavior_logps.tolist() == [[-1.0, -2.0, -3.0]]
    assert groups.prompt.tolist() == [0]
    assert tally.refused == 2
    assert tally.reasons == {
        "a group was refused: a row's first forward was missing or came after an update": 1,
        "a group was refused: a trainable token's log-prob is not finite": 1,
    }


def test_without_any_that_can_be_stored_there_is_no_view() -> None:
    waiting, tally = pending(candidate()), Tally()
    assert waiting.admissible(columns([[0, 1, 1]] * 3), tally) == ([], None)
    assert tally.refused == 1


def test_a_sync_of_the_reference_model_outdates_candidates_that_hold_its_log_probs() -> None:
    tally = Tally()
    left = Left(pending(candidate(slot=0), candidate(slot=1))).outdated("ref_per_token_logps")
    assert not left.pending.stale
    left.pending.candidates[1].keys |= {"ref_per_token_logps"}
    left = left.outdated("ref_per_token_logps").outdated("another_key")
    assert left.pending.stale
    assert Left().outdated("ref_per_token_logps") == Left()
    assert left.pending.admissible(columns([[1, 1, 1]] * 3), tally) == ([], None)
    assert tally.reasons == {f"a group was refused: {STALE}": 2}


def test_collected_candidates_have_their_rows_rewards_and_serials() -> None:
    batch = make_batch([[(2, 3), (2, 1), (2, 2)]] * 2, [], 0, [True, True])
    fresh = make_groups([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.25, 0.5, 0.75]])
    local = [(0, slice(0, 3), 0), (1, slice(0, 0), 0), (2, slice(4, 6), 1)]
    keys = [KEYS, KEYS, KEYS | {"images"}]
    found = collect_candidates(batch, FIELDS, fresh, local, keys, serial=40, update=6)
    assert [(one.serial, one.slot, one.rows, one.update) for one in found] == [
        (40, 0, slice(0, 3), 6),
        (41, 1, slice(0, 0), 6),
        (42, 2, slice(4, 6), 6),
    ]
    assert [one.keys for one in found] == keys
    first, nowhere, part = [one.group for one in found]
    assert nowhere is None
    assert first is not None
    assert part is not None
    assert first.tensors[STORED_REWARDS].tolist() == [[1.0], [0.0], [0.5]]
    assert part.tensors[STORED_REWARDS].tolist() == [[0.5], [0.75]], "from its own first row on"
    (expected,) = cut(batch, FIELDS, [rows_of(0)])
    assert torch.equal(first.tensors["completion_ids"], expected.tensors["completion_ids"])


def test_rewards_follow_the_names_of_their_functions() -> None:
    stored = with_rewards(group(), np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    assert with_named_rewards(stored, ["one", "two"], ["one", "two"]) is stored
    named = with_named_rewards(stored, ["one", "two"], ["two", "three"]).tensors[STORED_REWARDS]
    assert named[:, 0].tolist() == [10.0, 20.0, 30.0]
    assert bool(named[:, 1].isnan().all())
    assert with_named_rewards(group(), ["one"], ["two"]).tensors == {}


def test_what_a_batch_leaves_is_taken_once() -> None:
    waiting = pending(candidate())
    carry = StepCarry(serial=5)
    carry.collected(waiting, {9: [2, 3]}, update=7)
    left = carry.take()
    assert left == Left(waiting, {9: [2, 3]})
    assert left.serials == [waiting.candidates[0].serial]
    assert carry.take() == Left()
    assert (carry.serial, carry.collected_at) == (6, 7)
    assert carry.take_serials(3) == range(6, 9)
    assert carry.serial == 9


def test_what_a_batch_leaves_goes_into_checkpoints_and_comes_back() -> None:
    carry = StepCarry(8, Left(pending(candidate()), {9: [2, 3], 4: [0]}), 3, True, True, {"stored": 2.0})
    state = carry.state_dict()
    assert state["drawn"] == [(9, [2, 3]), (4, [0])]
    other = StepCarry(1, Left(pending(candidate()), {1: [1]}))
    other.load_state_dict(state)
    assert other == StepCarry(8, Left(), 3, True, True, {"stored": 2.0}), "one rank's last batch comes separately"


@pytest.mark.parametrize("first", [0, 1])
def test_rewards_are_cut_to_the_rows_of_the_group(first: int) -> None:
    rewards = np.array([[0.0], [1.0], [2.0], [3.0]])[first:]
    assert with_rewards(group(), rewards).tensors[STORED_REWARDS].flatten().tolist() == [
        0.0 + first,
        1.0 + first,
        2.0 + first,
    ]
