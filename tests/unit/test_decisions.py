"""What a step decides, from columns alone: measured, settled, selected, sampled and noted, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deciding import NO_KEYS, SIZE, Deciding, fresh_batch, layout, stats

from trl_replay import SeamError
from trl_replay.buffer.candidates import Candidate, Left, PendingGroups
from trl_replay.counters import Tally
from trl_replay.decision import Admitted, Decision
from trl_replay.step.decisions import TOO_EARLY
from trl_replay.step.stages import BatchDecision, Slots
from trl_replay.testing import make_groups

DEAD = [0.0, 0.0, 0.0, 0.0]
LIVE = [1.0, 0.0, 0.0, 0.0]
ONES = [1.0, 1.0, 1.0, 1.0]

# what the loss showed of replayed groups


def measured(deciding: Deciding, replayed: dict[int, int], **columns: Any) -> Tally:
    tally = Tally()
    places = {serial: [slot * SIZE + row for row in range(SIZE)] for slot, serial in replayed.items()}
    deciding.decide.record_replay_stats(places, stats(3, **columns), tally)
    return tally


def test_a_groups_drift_is_the_mean_over_its_seen_tokens_and_not_their_sum() -> None:
    deciding = Deciding(replay_max_log_ratio=0.5)
    deciding.store([1.0, 1.0, 1.0])
    seen = {0: [1, 2, 3, 2], 1: [1, 1, 1, 1], 2: [1, 1, 1, 1]}
    drift = {0: [0.5, 1.5, 0.6, 0.6], 1: [0.5, 0.5, 0.5, 0.5], 2: [0.5, 0.5, 0.5, 0.6]}
    tally = measured(deciding, {0: 0, 1: 1, 2: 2}, seen=seen, drift=drift)
    assert deciding.serials == [0, 1], "means of 0.4 and 0.5 are within the limit, one of 0.525 is not"
    np.testing.assert_allclose(deciding.buffer.table.drift, [0.4, 0.5], rtol=1e-6)
    assert (tally.retired, deciding.buffer.storage.serials) == (1, {0, 1})
    assert list(tally.reasons) == ["an entry left: its mean |log ratio| passed replay_max_log_ratio"]


def test_an_entry_that_the_loss_did_not_see_or_that_has_left_is_passed_over() -> None:
    deciding = Deciding(replay_max_log_ratio=0.5, replay_refresh="ratio")
    deciding.store([1.0, 2.0])
    measured(deciding, {0: 0, 1: 77, 2: 1}, seen={1: ONES, 2: ONES}, drift={1: [9.0] * 4, 2: [0.25] * 4})
    table = deciding.buffer.table
    np.testing.assert_allclose(table.drift, [0.0, 0.25])
    np.testing.assert_allclose(table.score, [1.0, 2.0 * np.exp(-0.25)])


def test_a_refresh_by_ratio_starts_from_the_score_at_admission() -> None:
    deciding = Deciding(replay_refresh="ratio")
    deciding.store([3.0])
    for drift in (0.5, 0.2):
        measured(deciding, {1: 0}, seen={1: ONES}, drift={1: [drift] * 4})
        np.testing.assert_allclose(deciding.buffer.table.score, [3.0 * np.exp(-drift)])


def test_a_refresh_by_advantage_is_the_mean_remaining_signal() -> None:
    deciding = Deciding(replay_refresh="advantage")
    deciding.store([3.0])
    measured(deciding, {0: 0}, seen={0: [1, 1, 2, 4]}, remaining_signal={0: [0.5, 0.5, 1.0, 4.0]})
    assert deciding.buffer.table.score.tolist() == [0.75]


def test_without_a_refresh_the_score_stays() -> None:
    deciding = Deciding()
    deciding.store([3.0])
    tally = measured(deciding, {0: 0}, seen={0: ONES}, drift={0: [9.0] * 4})
    assert deciding.buffer.table.score.tolist() == [3.0]
    assert (deciding.serials, tally.retired) == ([0], 0), "without a limit nothing is too far"


def test_the_rate_limiter_hears_of_the_effective_sample_size() -> None:
    deciding = Deciding(replay_min_ess=0.5)
    deciding.rate_limiter.fraction = 0.25
    measured(deciding, {}, seen={0: ONES}, ratio={0: ONES}, squares={0: ONES})
    assert deciding.rate_limiter.fraction == 0.5
    measured(deciding, {}, seen={0: ONES}, ratio={0: ONES}, squares={0: [9.0] * 4})
    assert deciding.rate_limiter.fraction == 0.25


# settling


def settled(deciding: Deciding, pending: PendingGroups | None = None, fresh: Any = None, **columns: Any) -> Decision:
    tally = Tally()
    generations = [] if fresh is None else [fresh]
    return Decision(tally, deciding.decide.settle(Left(pending), layout(**columns), generations, tally))


def pending_groups(rewards: list[list[float]], slots: list[int], update: int = 0) -> PendingGroups:
    """Candidates in some of the slots of a batch with these rewards, payload elsewhere."""
    groups = make_groups(rewards, update=update)
    candidates = [Candidate(10 + slot, slot, None, NO_KEYS, slice(0, 0), update) for slot in slots]
    return PendingGroups(groups, candidates)


def complete(groups: int = 3) -> dict[str, Any]:
    """Shared columns that say that all log-probs are there, and how many bytes a group takes."""
    nbytes = np.zeros(groups * SIZE, np.int64)
    nbytes[::SIZE] = 100
    return {"recorded": np.ones(groups * SIZE, np.int64), "logps": np.full(groups * SIZE, -2.0), "nbytes": nbytes}


@pytest.mark.parametrize("limit", [{"replay_max_age": 3}, {"replay_max_uses": 2}])
def test_entries_that_no_limit_will_let_through_again_leave_when_a_batch_settles(limit: dict[str, int]) -> None:
    deciding = Deciding(update=10, **limit)
    deciding.store([1.0] * 4, update=[10, 7, 6, 0], uses=[0, 1, 2, 3])
    decided = settled(deciding)
    assert deciding.serials == [0, 1]
    assert (decided.tally.retired, decided.tally.refused) == (0, 0), "these limits are an entry's ordinary end"
    assert decided.admitted.arrivals == []


def test_what_a_storage_had_no_room_for_leaves_everywhere_and_is_counted() -> None:
    deciding = Deciding()
    deciding.store([1.0] * 4)
    overflow = np.zeros(12, np.int64)
    overflow[:3] = [1, 3, 3]  # serials 0 and 2, the latter on two processes
    tally = settled(deciding, overflow=overflow).tally
    assert deciding.serials == [1, 3]
    assert tally.refused == 2
    assert tally.reasons["a group was refused: the storage had no room for it"] == 2


def test_candidates_are_scored_and_stored_with_all_that_the_table_tells() -> None:
    deciding = Deciding(update=5, replay_scorer="mean_reward")
    pending = pending_groups([LIVE, DEAD, [1.0, 1.0, 0.5, 0.5]], [0, 2], update=4)
    pending = replace(pending, groups=replace(pending.groups, items=np.full((3, SIZE), 7)))
    decided = settled(deciding, pending, **complete())
    table = deciding.buffer.table
    assert table.serial.tolist() == [10, 12]
    assert table.score.tolist() == table.first_score.tolist() == [0.25, 0.75]
    assert table.update.tolist() == [4, 4]
    assert table.prompt.tolist() == [0, 2]
    assert table.tokens.tolist() == [20, 20]
    assert table.items.tolist() == [28, 28]
    assert table.nbytes.tolist() == [100 + 2 * 8 * SIZE] * 2, "payload, and a prompt and completion length a row"
    np.testing.assert_allclose(table.reward_mean, [0.25, 0.75])
    np.testing.assert_allclose(table.reward_std, [0.5, 1 / np.sqrt(12)], rtol=1e-6)
    assert decided.admitted.serials == [10, 12]
    assert (decided.tally.stored, decided.tally.evicted, decided.tally.refused) == (2, 0, 0)
    assert deciding.rate_limiter.state_dict()["inserted"] == 2


def test_candidates_that_lose_against_the_entries_do_not_arrive() -> None:
    deciding = Deciding(capacity=2, replay_scorer="mean_reward", replay_evictor="heap")
    deciding.store([0.5, 0.1])
    decided = settled(deciding, pending_groups([LIVE, LIVE, [1.0, 1.0, 1.0, 0.0]], [0, 2]), **complete())
    assert deciding.serials == [0, 12]
    assert decided.admitted.serials == [12]
    assert (decided.tally.stored, decided.tally.evicted) == (1, 1)
    assert deciding.rate_limiter.state_dict()["inserted"] == 1


def test_scores_that_are_not_finite_and_groups_that_are_too_large_are_refused() -> None:
    scores = [np.nan, 1.0, -np.inf]
    deciding = Deciding(replay_scorer=lambda groups, context: np.array(scores)[groups.prompt])
    deciding.buffer.max_bytes = 1000 + deciding.buffer.table.row_bytes
    sizes = complete()
    sizes["nbytes"][[0, 4, 8]] = [900, 1000 - 2 * 8 * SIZE, 9000]
    decided = settled(deciding, pending_groups([LIVE] * 3, [0, 1, 2]), **sizes)
    assert deciding.serials == [11]
    assert decided.tally.reasons["a group was refused: its score is not finite"] == 2
    scores[:] = [1.0] * 3
    sizes["nbytes"][4] += 1
    decided = settled(deciding, pending_groups([LIVE] * 3, [1]), **sizes)
    assert deciding.serials == [11]
    assert decided.tally.reasons["a group was refused: it alone is larger than replay_max_bytes"] == 1


def test_a_prompt_is_solved_by_enough_passes_and_its_entries_and_candidates_leave() -> None:
    deciding = Deciding(replay_retire_passes=2, replay_pass_reward=0.8)
    deciding.store([1.0] * 3, prompt=[0, 1, 0])
    fresh = make_groups([[0.8, 0.9, 0.0, 0.0], [0.9, 0.7, 0.7, 0.7], DEAD])
    decided = settled(deciding, pending_groups([LIVE, LIVE, DEAD], [0, 1]), fresh, **complete())
    assert deciding.serials == [1, 11], "prompt 0 has two passes, prompt 1 has one"
    assert (decided.tally.retired, decided.tally.refused) == (2, 1)
    assert decided.tally.reasons["an entry left: its prompt was solved (replay_retire_passes)"] == 2
    assert decided.tally.reasons["a group was refused: its prompt is solved (replay_retire_passes)"] == 1


def test_the_end_of_training_solves_nothing() -> None:
    deciding = Deciding(replay_retire_passes=1)
    deciding.store([1.0])
    settled(deciding, pending_groups([LIVE, LIVE, DEAD], [0]), **complete())
    assert deciding.serials == [0, 10]
    assert deciding.rate_limiter.state_dict()["seen"] == 0


# scores that age


def test_scores_above_zero_fall_by_half_a_half_life() -> None:
    deciding = Deciding(capacity=2, update=20, replay_half_life=10.0, replay_evictor="heap")
    deciding.store([4.0, 1.5], update=[0, 20])
    deciding.buffer.capacity = 1
    assert deciding.decide.trim() == 1
    assert deciding.serials == [1], "4 of twenty updates ago is worth 1 now"
    assert deciding.buffer.table.score.tolist() == [1.5], "the table keeps the scores as they were given"


def test_scores_below_zero_age_too_and_fall() -> None:
    deciding = Deciding(capacity=2, update=20, replay_half_life=10.0, replay_evictor="heap")
    deciding.store([-1.0, -3.0], update=[0, 20])
    deciding.buffer.capacity = 1
    assert deciding.decide.trim() == 1
    assert deciding.serials == [1], "-1 of twenty updates ago is worth -4 now"


def test_scores_below_zero_end_below_all_numbers_and_groups_of_now_keep_theirs() -> None:
    seen = []

    def heap(table: Any, context: Any) -> Any:
        seen.append(table.score.tolist())
        return table.score

    deciding = Deciding(capacity=3, update=10**6, replay_half_life=1e-3, replay_evictor=heap)
    deciding.store([-100.0, -1e9, 0.0], update=[0, 10**6, 0])
    deciding.buffer.capacity = 2
    deciding.decide.trim()
    assert seen == [[-np.inf, -1e9, 0.0]]
    assert deciding.serials == [1, 2]


def test_samplers_see_aged_scores() -> None:
    deciding = Deciding(update=20, replay_half_life=10.0, replay_sampler="top")
    deciding.store([4.0, 1.5, 0.5], update=[0, 19, 19])
    drawn = sampled(deciding, [1])[0]
    assert drawn.serials == [1]


def test_groups_of_every_round_are_counted_and_seen_by_the_limits() -> None:
    deciding = Deciding(replay_retire_passes=4, replay_start_pass_rate=0.5)
    batch, another = make_groups([LIVE, DEAD]), make_groups([[1.0] * 4])
    tally = Tally()
    solved = deciding.decide.solve([batch, another], tally)
    assert (tally.generated, tally.dead) == (3, 2)
    assert solved.tolist() == another.prompt.tolist()


# selecting


def selected(deciding: Deciding, rewards: list[list[float]]) -> tuple[list[int], Tally]:
    tally = Tally()
    slots = deciding.decide.select(make_groups(rewards), tally)
    return slots.order[: slots.most], tally


def test_the_selectors_slots_are_cut_to_what_the_limits_allow_and_the_limit_is_named() -> None:
    slots, tally = selected(Deciding(replay_max_fraction=0.5), [DEAD, LIVE, DEAD, DEAD])
    assert slots == [0, 2]
    assert tally.groups == 4
    assert tally.reasons == {"replay_max_fraction allows 2 of 4 groups": 1}


def test_as_many_slots_as_allowed_are_no_reason_to_tell() -> None:
    slots, tally = selected(Deciding(replay_max_fraction=0.5), [DEAD, LIVE, DEAD, LIVE])
    assert slots == [0, 2]
    assert not tally.reasons


def test_a_batch_without_replaceable_groups_says_so() -> None:
    slots, tally = selected(Deciding(), [LIVE, LIVE])
    assert slots == []
    assert tally.reasons == {"no group was dead: nothing to replace": 1}
    slots, tally = selected(Deciding(replay_selector=lambda groups, context: []), [LIVE, DEAD])
    assert slots == []
    assert tally.reasons == {"no group of the batch was replaceable (the selector chose none)": 1}


# sampling


def sampled(
    deciding: Deciding, slots: list[int], rewards: Any = None, collected_at: int | None = None, keys: Any = NO_KEYS
) -> tuple[Any, Tally]:
    tally = Tally()
    fresh = fresh_batch(make_groups(rewards or [DEAD, DEAD, LIVE]), keys=keys)
    filled = deciding.decide.sample(fresh, Slots(slots, len(slots)), collected_at, tally)
    return filled.sampled, tally


def test_a_slot_whose_rows_would_all_teach_nothing_stays_as_it_is() -> None:
    deciding = Deciding(update=10)
    deciding.store([1.0], row_advantage=np.zeros((1, SIZE)))
    drawn, tally = sampled(deciding, [0])
    assert drawn.taken == []
    assert tally.reasons["a mixed group would have been dead"] == 1
    assert (tally.replaced, tally.dead_after) == (0, 2)


def test_masked_rows_count_as_no_tokens() -> None:
    fresh = make_groups([LIVE, LIVE])
    masked = np.zeros(fresh.advantages.shape, bool)
    masked[1, 2] = True
    tally = Tally()
    Deciding().decide.sample(fresh_batch(replace(fresh, masked=masked)), Slots([], 0), None, tally)
    assert tally.items_delta == -fresh.trainable[1, 2]


def test_what_is_drawn_is_told_and_counted() -> None:
    deciding = Deciding(update=10, replay_sampler="top")
    deciding.store(
        [1.0, 4.0, 2.0], update=[9, 7, 4], row_items=[[50, 0, 0, 0], [5, 6, 0, 0], [13, 0, 0, 0]], uses=[0, 3, 1]
    )
    drawn, tally = sampled(deciding, [1, 0])
    told = [(taken.slot, taken.serial, taken.row, taken.age, taken.priority) for taken in drawn.taken]
    assert told == [(1, 1, 1, 3, 1.0), (0, 2, 2, 6, 1.0)]
    assert all(taken.is_whole for taken in drawn.taken)
    assert drawn.places(SIZE) == {1: [4, 5, 6, 7], 2: [0, 1, 2, 3]}
    table = deciding.buffer.table
    assert table.uses.tolist() == [0, 4, 2]
    assert table.last_used.tolist() == [-1, 10, 10]
    assert (tally.replaced, tally.age, tally.score, tally.uses) == (2, 9.0, 6.0, 6.0)
    assert tally.items_delta == 11 + 13 - 2 * 20, "tokens put in, less those taken out"
    assert tally.dead_after == 0
    assert not tally.reasons
    assert deciding.rate_limiter.state_dict()["drawn"] == 2


def test_dead_groups_that_nothing_fills_are_counted_as_left() -> None:
    deciding = Deciding(update=1)
    deciding.store([1.0])
    drawn, tally = sampled(deciding, [2, 0])
    assert drawn.slots == [2], "the selector's first slot, though its group is live"
    assert tally.dead_after == 2
    assert list(tally.reasons) == ["the buffer held fewer eligible groups than slots"]


def test_without_slots_nothing_is_drawn_and_no_reason_is_told() -> None:
    deciding = Deciding(update=1)
    deciding.store([1.0])
    drawn, tally = sampled(deciding, [])
    assert drawn.slots == []
    assert (tally.replaced, tally.items_delta, tally.dead_after) == (0, 0.0, 2)
    assert not tally.reasons


def test_why_too_little_was_drawn_is_told_with_the_limits_that_held_back() -> None:
    deciding = Deciding(update=10)
    never = "the buffer was empty: no live group has been stored yet"
    assert list(sampled(deciding, [0])[1].reasons) == [never]
    deciding.rate_limiter.inserted(1)
    assert list(sampled(deciding, [0])[1].reasons) == ["the buffer was empty"]
    deciding = Deciding(update=10, replay_min_size=2)
    deciding.store([1.0])
    words = "the buffer held fewer eligible groups than slots (held back: replay_min_size)"
    assert list(sampled(deciding, [0])[1].reasons) == [words]
    deciding = Deciding(update=10, replay_max_age=3, replay_max_uses=1)
    deciding.store([1.0] * 3, update=[0, 9, 10], uses=[0, 1, 0])
    words = "the buffer held fewer eligible groups than slots (held back: replay_max_age, replay_max_uses, too new)"
    assert list(sampled(deciding, [0])[1].reasons) == [words]


def test_only_eligible_entries_are_drawn_and_at_their_own_rows() -> None:
    deciding = Deciding(update=5, replay_sampler="top")
    deciding.store([9.0, 1.0, 8.0, 2.0], update=[5, 0, 5, 0])
    drawn, _ = sampled(deciding, [0, 1])
    assert drawn.serials == [3, 1], "the higher scores are too new"
    assert [taken.row for taken in drawn.taken] == [3, 1]


def test_nothing_is_drawn_before_the_loss_has_run() -> None:
    deciding = Deciding(update=3)
    deciding.store([1.0])
    deciding.handshake.verified = False
    for collected_at in (None, 3):
        drawn, tally = sampled(deciding, [0], collected_at=collected_at)
        assert drawn.slots == []
        assert list(tally.reasons) == [TOO_EARLY], "a warm start filled it"
    empty = Deciding()
    empty.handshake.verified = False
    assert list(sampled(empty, [0])[1].reasons) == ["the buffer was empty: no live group has been stored yet"]
    with pytest.raises(SeamError, match="goes around the seam"):
        sampled(deciding, [0], collected_at=2)
    assert sampled(deciding, [], collected_at=2)[0].slots == [], "where there is nothing to fill nothing is asked"


def test_priorities_are_chances_relative_to_the_least_likely_entry() -> None:
    weights = np.array([0.5, 2.0, 0.0, np.inf, 1.0])
    deciding = Deciding(update=1, weigh=lambda table, context: weights, replay_sampler="newest")
    deciding.store([1.0] * 5)
    drawn, _ = sampled(deciding, [0, 1, 2, 3, 4], rewards=[DEAD] * 5)
    assert drawn.serials == [4, 3, 2, 1, 0]
    told = [taken.priority for taken in drawn.taken]
    assert told == [2.0, 1.0, 1.0, 4.0, 1.0], "an entry without a usable weight counts as the least likely"
    deciding = Deciding(update=1, weigh=lambda table, context: np.zeros(len(table)))
    deciding.store([1.0])
    assert [taken.priority for taken in sampled(deciding, [0])[0].taken] == [1.0]


# filling the batch, and which groups are noted


def filled(deciding: Deciding, rewards: list[list[float]], known: bool = False, **changed: Any) -> BatchDecision:
    fresh = fresh_batch(replace(make_groups(rewards), **changed), known=known)
    return deciding.decide.fill_batch(fresh, Admitted(), None, Tally())


def test_live_groups_that_stay_are_noted() -> None:
    deciding = Deciding(update=1)
    deciding.store([1.0])
    decided = filled(deciding, [LIVE, DEAD, LIVE])
    assert decided.sampled.slots == [1]
    assert decided.candidates == [0, 2]
    assert decided.copies == []


@pytest.mark.parametrize(("known", "candidates"), [(False, [2]), (True, [0, 2])])
def test_a_displaced_live_group_is_noted_only_where_its_log_probs_are_known(
    known: bool, candidates: list[int]
) -> None:
    deciding = Deciding(update=1, replay_selector=lambda groups, context: [0])
    deciding.store([1.0])
    assert filled(deciding, [LIVE, DEAD, LIVE], known).candidates == candidates


def test_groups_of_solved_prompts_are_not_noted() -> None:
    deciding = Deciding(replay_retire_passes=3, replay_pass_reward=1.0)
    decided = filled(deciding, [LIVE, [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    assert decided.candidates == [0, 2]
    assert decided.tally.reasons["a group was refused: its prompt is solved (replay_retire_passes)"] == 1


def test_a_dry_run_counts_what_it_would_have_replaced_and_replaces_nothing() -> None:
    deciding = Deciding(update=1, replay_dry_run=True, replay_unfilled="exclude")
    deciding.store([1.0], row_items=[[0, 1, 1, 1]])
    decided = filled(deciding, [DEAD, DEAD, LIVE])
    assert decided.sampled.slots == []
    assert (decided.tally.replaced, decided.tally.items_delta, decided.tally.excluded) == (1, 0.0, 0)
    assert decided.candidates == [2]


def test_excluded_groups_and_their_tokens_are_counted() -> None:
    deciding = Deciding(update=1, replay_unfilled="exclude")
    deciding.store([1.0])
    tokens = np.arange(12).reshape(3, SIZE)
    decided = filled(deciding, [DEAD, LIVE, DEAD], items=tokens)
    assert decided.sampled.slots == [0]
    assert (decided.tally.excluded, decided.tally.excluded_items) == (1, 8 + 9 + 10 + 11)


def test_copies_of_live_groups_fill_what_replay_left_and_are_counted() -> None:
    deciding = Deciding(update=1, replay_unfilled="intra_batch")
    deciding.store([1.0], row_items=[[10, 0, 10, 10]])
    tokens = np.repeat([[1], [2], [4], [8]], SIZE, axis=1)
    decided = filled(deciding, [DEAD, DEAD, LIVE, DEAD], items=tokens)
    assert decided.sampled.slots == [0]
    assert decided.copies == [(1, 2), (3, 2)]
    assert decided.tally.dead_after == 0
    assert decided.tally.items_delta == (30 - 4) + (16 - 8) + (16 - 32)
    assert decided.candidates == [2]
