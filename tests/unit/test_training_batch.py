"""From what was decided to the batch that is trained on: tokens counted, dead groups masked, candidates collected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import PAD, SIZE, make_batch, rows_of
from deciding import decision, fresh_batch
from sampling import whole

from trl_replay.batch.compose import compose, cut
from trl_replay.batch.group_view import blank
from trl_replay.distributed.row_layout import RowLayout
from trl_replay.fields import FieldTable
from trl_replay.loss.row_mask import NOTHING_MASKED
from trl_replay.step.training_batch import collect, compose_batch, count_items, mask_rows
from trl_replay.testing import make_groups

FIELDS = FieldTable(PAD)
LIVE, DEAD = [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]
FIRST_AND_LAST = [0, 1, 2, 6, 7, 8]
LENGTHS = [[(2, 3), (2, 1), (2, 2)], [(4, 2), (4, 2), (4, 2)], [(1, 5), (1, 4), (1, 3)]]


def batch(*keys: str) -> dict[str, Any]:
    return make_batch(LENGTHS, list(keys), 0, [True] * 3)


def layout(rank: int = 0, ranks: int = 1) -> RowLayout:
    return RowLayout(blank(0, ranks * 9), blank(rank * 9, 9), SIZE)


class Hooks:
    """Composes as we do, and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def compose(self, given: Any, placements: Any, context: Any) -> Any:
        self.given.append((placements, context))
        return compose(given, FIELDS, placements)


def composed(payload: Any, **decided: Any) -> tuple[Any, Any, Any, Hooks]:
    hooks, given = Hooks(), batch()
    made = decision(fresh_batch(make_groups([LIVE] * 3), layout()), **decided)
    components: Any = SimpleNamespace(hooks=hooks, fields=FIELDS)
    out, placements = compose_batch(given, made, payload, components, "context")  # type: ignore[arg-type]
    return given, out, placements, hooks


def test_without_anything_to_place_the_batch_is_the_same_object() -> None:
    given, out, placements, hooks = composed({})
    assert out is given
    assert (placements, hooks.given) == ([], [])


def test_drawn_groups_and_copies_are_placed_and_only_drawn_ones_are_returned() -> None:
    stored = cut(make_batch(LENGTHS, [], 7, [True] * 3), FIELDS, [rows_of(2)])[0]
    drawn = whole([0], [9], [4], [0], [1.0], SIZE)
    given, out, placements, hooks = composed({9: stored}, sampled=drawn, copies=[(2, 1)])
    assert [placed.serial for placed in placements] == [9]
    ((placed, context),) = hooks.given
    assert [one.slot for one in placed] == [0, 2]
    assert context == "context"
    found, copied, live = cut(out, FIELDS, [rows_of(0), rows_of(2), rows_of(1)])
    assert torch.equal(found.tensors["completion_ids"], stored.tensors["completion_ids"])
    assert torch.equal(copied.tensors["completion_ids"], live.tensors["completion_ids"])
    assert torch.equal(given["completion_ids"], batch()["completion_ids"]), "the given batch is as it was"


def total(**counters: float) -> dict[str, float]:
    return {"items_delta": 0.0, "excluded": 0.0, "excluded_items": 0.0, "masked_apart": 0.0, "groups": 4.0, **counters}


@pytest.mark.parametrize(
    ("counters", "change"),
    [
        ({}, 0),
        ({"items_delta": 5.0}, 5),
        ({"items_delta": -3.0}, -3),
        ({"excluded": 1.0, "excluded_items": 2.0}, -2),
        ({"items_delta": 5.0, "excluded": 3.0, "excluded_items": 2.0}, 3),
        ({"items_delta": 2.0, "excluded": 3.0, "excluded_items": 2.0}, 0),
        ({"excluded": 4.0, "excluded_items": 9.0}, 0),
    ],
)
def test_the_token_count_follows_what_all_ranks_exchanged_and_excluded(counters: Any, change: int) -> None:
    given = batch()
    exchanged = {**given, "completion_ids": given["completion_ids"] + 1}
    out = count_items(given, exchanged, total(**counters))
    before = given["num_items_in_batch"]
    assert int(out["num_items_in_batch"]) == int(before) + change
    assert out["num_items_in_batch"].dtype == before.dtype
    assert (out is exchanged) == (change == 0)
    assert out["completion_ids"] is exchanged["completion_ids"]


def masked(unfilled: str, rank: int = 0, ranks: int = 1, filled: tuple[int, ...] = (), **counters: float) -> Any:
    fresh = fresh_batch(make_groups([DEAD, LIVE, DEAD] * ranks), layout(rank, ranks))
    return mask_rows(decision(fresh, sampled=whole(filled, size=SIZE)), total(**counters), unfilled, "rows")


def test_dead_groups_of_this_process_that_nothing_fills_are_masked() -> None:
    assert masked("mask").masked == FIRST_AND_LAST
    assert masked("mask").excluded == []
    assert masked("mask", filled=(0,)).masked == [6, 7, 8]
    assert masked("mask", rank=1, ranks=2).masked == FIRST_AND_LAST
    assert (masked("mask").factor, masked("mask").denominator) == (1.0, "")
    for choice in ("keep", "intra_batch"):
        assert masked(choice) is NOTHING_MASKED


def test_excluded_groups_leave_the_denominator_unless_nothing_else_is_left() -> None:
    mask = masked("exclude", excluded=3.0)
    assert (mask.masked, mask.factor, mask.denominator) == (FIRST_AND_LAST, 4.0, "rows")
    assert mask.excluded == FIRST_AND_LAST
    mask = masked("exclude", excluded=4.0)
    assert (mask.masked, mask.factor, mask.denominator) == (FIRST_AND_LAST, 1.0, "")
    assert mask.excluded == []


@pytest.mark.parametrize("known", [False, True])
def test_live_groups_wait_for_their_log_probs_where_stock_has_none(known: bool) -> None:
    keys = ["old_per_token_logps"] if known else []
    fresh = fresh_batch(make_groups([LIVE, DEAD, LIVE]), layout())
    components: Any = SimpleNamespace(fields=FIELDS, payload_leaves_device=True)
    candidates = collect(batch(*keys), decision(fresh, candidates=[0, 2]), components, serial=40, update=6)
    assert [(one.serial, one.slot, one.update) for one in candidates] == [(40, 0, 6), (41, 2, 6)]
    assert [one.waits for one in candidates] == [not known] * 2
    assert all("old_per_token_logps" in one.keys for one in candidates), "by then they will have them"


def test_candidates_without_rows_here_need_no_log_probs_of_this_process() -> None:
    fresh = fresh_batch(make_groups([LIVE] * 6), layout(1, 2))
    components: Any = SimpleNamespace(fields=FIELDS, payload_leaves_device=True)
    candidates = collect(batch(), decision(fresh, candidates=[1, 4]), components, serial=0, update=0)
    assert [(one.slot, one.waits) for one in candidates] == [(1, False), (4, True)]
