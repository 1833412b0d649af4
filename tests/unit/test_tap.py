"""The tap inside a loss that is made up here: what it records, what it hands over, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trl_replay import Corrected, ReplayedRows, ResultError, SeamError
from trl_replay.buffer import candidates
from trl_replay.buffer.candidates import Candidate
from trl_replay.loss.bounds import Bounds
from trl_replay.loss.handshake import Handshake
from trl_replay.loss.micro_batch import ROWS
from trl_replay.loss.row_mask import RowMask
from trl_replay.loss.supply import Supply
from trl_replay.loss.tap import Tap
from trl_replay.progress import KeptErrors
from trl_replay.types import Group, Placement

SIZE = 2
"""Rows of a group."""
WIDTH = 3
LENGTHS = [2, 3]
"""Tokens of the two rows of each stored group."""


def ratio(rows: ReplayedRows) -> Corrected:
    return Corrected(rows.behavior_logps)


def make_tap(
    correct: Callable[[ReplayedRows], Corrected] = ratio,
    token_weights: bool = True,
    forward: bool = False,
    errors: KeptErrors | None = None,
) -> Tap:
    bounds = Bounds()
    supply = Supply(correct, bounds, token_weights)
    errors = errors or KeptErrors(alone=True)
    return Tap(supply, SIZE, forward, Handshake(forward), errors, bounds.form, lambda entropies, mask, replayed: None)


def candidate(serial: int, first_row: int) -> Candidate:
    rows = slice(first_row, first_row + SIZE)
    return Candidate(serial, first_row // SIZE, None, frozenset(), rows, update=0)


def placement(first_row: int, logps: list[float], advantages: tuple[float, float] = (1.5, -0.5), **told: Any) -> Any:
    """A stored group with five tokens, in the place of the rows from `first_row` on."""
    tensors = {"old_per_token_logps": torch.tensor(logps), "advantages": torch.tensor(advantages)}
    group = Group(tensors, frozenset(tensors), np.array([1]), np.array(LENGTHS))
    return Placement(first_row // SIZE, group, 3, told.pop("age", 4), first_row, count=SIZE, **told)


def batch(ids: torch.Tensor, lengths: list[int] | None = None, **keys: Any) -> dict[str, Any]:
    """A micro-batch of all rows that `ids` stands for."""
    lengths = lengths or [WIDTH] * len(ids)
    mask = torch.tensor([[int(place < length) for place in range(WIDTH)] for length in lengths])
    return {"completion_mask": mask, "advantages": torch.ones(len(ids)), ROWS: ids, **keys}


class Loss:
    """A loss that calls the log-prob method and then reads the old log-probs, as TRL's does."""

    def __init__(self, tap: Tap, logps: torch.Tensor, *others: Any) -> None:
        self.tap, self.logps, self.others = tap, logps.clone().requires_grad_(), others
        self.result: Any = None
        self.seen: dict[str, Any] = {}

    def __call__(self, micro: Any) -> torch.Tensor:
        self.result = self.tap.logps((self.logps, *self.others))
        micro.get("old_per_token_logps")
        self.seen = dict(micro)
        return self.result[0].sum()


def run(tap: Tap, inputs: dict[str, Any], logps: torch.Tensor, *others: Any) -> Loss:
    loss = Loss(tap, logps, *others)
    tap.loss(loss, inputs)
    return loss


def logps_of(rows: int, start: float = -1.0) -> torch.Tensor:
    return start - torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) / 8


# recording


def test_a_candidates_rows_are_recorded_wherever_the_shuffle_put_them() -> None:
    tap = make_tap()
    first, second = candidate(5, 0), candidate(6, 2)
    ids = tap.expect(6, [first, second], [], composed=False)
    assert ids[:, 0].tolist() == [11, 12, 13, 14, 0, 0]
    assert ids[:, 1].tolist() == [0] * 6
    order = [3, 0, 5, 2, 1, 4]
    logps = logps_of(6)
    run(tap, batch(ids[order]), logps)
    assert [record.tolist() for record in first.records] == [logps[1].tolist(), logps[4].tolist()]
    assert [record.tolist() for record in second.records] == [logps[3].tolist(), logps[0].tolist()]
    assert not any(record.requires_grad for record in first.records)
    assert tap.handshake.verified


def test_the_first_forward_counts_and_one_after_an_update_does_not() -> None:
    tap = make_tap()
    early, late = candidate(0, 0), candidate(1, 2)
    ids = tap.expect(4, [early, late], [], composed=False)
    run(tap, batch(ids[:2]), logps_of(2))
    run(tap, batch(ids[:2]), logps_of(2, start=-50.0))
    assert torch.equal(torch.stack(early.records), logps_of(2))
    tap.forget()  # as the session does at an update
    run(tap, batch(ids[2:]), logps_of(2))
    assert late.records == [None, None]


def test_what_is_forgotten_is_not_recorded_any_more() -> None:
    tap = make_tap()
    recorded, forgotten = candidate(0, 0), candidate(1, 2)
    ids = tap.expect(4, [recorded, forgotten], [], composed=False)
    run(tap, batch(ids[:2]), logps_of(2))
    tap.forget()
    run(tap, batch(ids[2:]), logps_of(2))
    assert torch.equal(torch.stack(recorded.records), logps_of(2)), "what is recorded stays"
    assert forgotten.records == [None, None]


def test_rows_of_an_earlier_batch_and_forwards_without_gradient_are_not_recorded() -> None:
    tap = make_tap()
    before, now = candidate(0, 0), candidate(1, 0)
    ids = tap.expect(2, [before], [], composed=False)
    tap.expect(2, [now], [], composed=False)
    run(tap, batch(ids), logps_of(2))
    assert before.records == now.records == [None, None]
    assert tap.logps((logps_of(2).requires_grad_(), "entropies"))[1] == "entropies", (
        "outside of a loss nothing happens"
    )

    def without_gradient_first(micro: Any) -> torch.Tensor:
        tap.logps((logps_of(2, start=-70.0), None))
        return Loss(tap, logps_of(2))(micro)

    ids = tap.expect(2, [now], [], composed=False)
    tap.loss(without_gradient_first, batch(ids))
    assert torch.equal(torch.stack(now.records), logps_of(2))


# supplying


def test_replayed_rows_get_the_stored_log_probs_and_fresh_ones_their_own() -> None:
    tap = make_tap()
    ids = tap.expect(4, [], [placement(2, [-5.0, -6.0, -7.0, -8.0, -9.0])], composed=True)
    assert ids.tolist() == [[0, 1], [0, 1], [-1, 1], [-2, 1]]
    order = [2, 0, 3, 1]
    logps = logps_of(4)
    inputs = batch(ids[order], lengths=[2, 3, 3, 1])
    loss = run(tap, inputs, logps)
    old = loss.seen["old_per_token_logps"]
    assert old[0].tolist() == [-5.0, -6.0, logps[0, 2].item()], "padding has the model's own"
    assert old[2].tolist() == [-7.0, -8.0, -9.0]
    assert torch.equal(old[[1, 3]], logps[[1, 3]])
    assert not old.requires_grad
    assert loss.seen["sampling_per_token_logps"][0].tolist() == [-5.0, -6.0, logps[0, 2].item()]
    assert inputs.keys() == {"completion_mask", "advantages", ROWS}, "the trainer's own micro-batch is as it was"
    assert loss.seen["advantages"] is inputs["advantages"]


def test_stocks_old_and_reference_log_probs_stay_but_for_replayed_rows_and_padding() -> None:
    tap = make_tap()
    ids = tap.expect(3, [], [placement(0, [-5.0, -6.0, -7.0, -8.0, -9.0])], composed=True)
    given = torch.full((3, WIDTH), -3.0)
    reference = torch.full((3, WIDTH), -4.0)
    logps = logps_of(3)
    inputs = batch(ids, [2, 3, 1], old_per_token_logps=given, ref_per_token_logps=reference)
    inputs["sampling_per_token_logps"] = sampling = torch.full((3, WIDTH), -2.0)
    loss = run(tap, inputs, logps)
    assert loss.seen["old_per_token_logps"][2].tolist() == [-3.0, logps[2, 1].item(), logps[2, 2].item()]
    assert loss.seen["old_per_token_logps"][0].tolist() == [-5.0, -6.0, logps[0, 2].item()]
    assert loss.seen["ref_per_token_logps"][0].tolist() == [-4.0, -4.0, logps[0, 2].item()]
    assert loss.seen["sampling_per_token_logps"] is sampling, "what the sampler told stays"
    assert given.tolist() == [[-3.0] * 3] * 3
    assert reference.tolist() == [[-4.0] * 3] * 3


def test_a_batch_that_nothing_was_exchanged_in_is_left_alone() -> None:
    tap = make_tap()
    ids = tap.expect(2, [candidate(0, 0)], [], composed=False)
    loss = run(tap, batch(ids), logps_of(2))
    assert loss.seen.keys() == {"completion_mask", "advantages"}
    plain = {"advantages": torch.ones(1)}
    assert tap.loss(lambda inputs: inputs is plain, plain) is True, "without ids the loss gets what it was given"


def test_the_correction_sees_what_it_is_promised() -> None:
    seen: list[ReplayedRows] = []
    tap = make_tap(lambda rows: seen.append(rows) or ratio(rows))
    groups = [placement(0, [-5.0] * 5, (2.0, -2.0), age=3, priority=4.0), placement(2, [-6.0] * 5, (0.5, 0.0), age=9)]
    ids = tap.expect(5, [], groups, composed=True)
    assert ids[:, 0].tolist() == [-1, -2, -3, -4, 0]
    order = [2, 4, 1]
    logps = logps_of(3)
    tools = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0]])
    inputs = batch(ids[order], [2, 3, 3], tool_mask=tools)
    inputs["advantages"] = torch.tensor([0.5, 9.0, -2.0])
    run(tap, inputs, logps)
    (rows,) = seen
    assert torch.equal(rows.logps, logps[[0, 2]])
    assert rows.mask.tolist() == [[True, False, False], [True, True, False]]
    assert rows.behavior_logps[0].tolist() == [-6.0, *logps[0, 1:].tolist()]
    assert rows.behavior_logps[1].tolist() == [-5.0, -5.0, logps[2, 2].item()]
    assert rows.advantages.tolist() == [0.5, -2.0]
    assert rows.ages.tolist() == [9, 3]
    assert rows.priorities is not None
    assert rows.priorities.tolist() == [1.0, 4.0]
    columns = tap.supply.stats.columns(5)
    assert columns["seen"].tolist() == [0, 2, 1, 0, 0], "at the rows' places in the batch, not in the micro-batch"


def test_the_proximal_policy_is_that_of_a_rows_first_forward_since_it_was_drawn() -> None:
    seen: list[ReplayedRows] = []
    tap = make_tap(lambda rows: seen.append(rows) or ratio(rows))
    ids = tap.expect(2, [], [placement(0, [-5.0] * 5)], composed=True)
    for start in (-1.0, -2.0):
        run(tap, batch(ids), logps_of(2, start))
    assert torch.equal(seen[0].proximal_logps, logps_of(2, -1.0))
    assert torch.equal(seen[1].proximal_logps, logps_of(2, -1.0))
    assert torch.equal(seen[1].logps, logps_of(2, -2.0))


def test_one_weight_a_row_scales_its_advantage_and_zero_takes_its_ratio_and_kl_away() -> None:
    tap = make_tap(lambda rows: Corrected(rows.behavior_logps, torch.tensor([0.5, 0.0])))
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5)], composed=True)
    logps = logps_of(3)
    entropies = torch.ones(3, WIDTH, requires_grad=True) * 2
    inputs = batch(ids, [2, 3, 3], ref_per_token_logps=torch.full((3, WIDTH), -4.0))
    loss = run(tap, inputs, logps, entropies)
    assert loss.seen["advantages"].tolist() == [0.5, 0.0, 1.0]
    assert inputs["advantages"].tolist() == [1.0, 1.0, 1.0]
    assert loss.seen["old_per_token_logps"][0].tolist()[:2] == [-5.0, -5.0]
    assert torch.equal(loss.seen["old_per_token_logps"][1], logps[1]), "its ratio is 1"
    assert torch.equal(loss.seen["ref_per_token_logps"][1], logps[1]), "and its KL 0"
    assert loss.seen["ref_per_token_logps"][0].tolist()[:2] == [-4.0, -4.0]
    (gradient,) = torch.autograd.grad(loss.result[1].sum(), entropies)
    assert gradient.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


def test_a_weight_for_each_token_widens_the_advantages_and_keeps_the_ratios_of_the_row() -> None:
    weights = torch.tensor([[0.5, 0.0, 1.0], [2.0, 1.0, 0.0]])
    tap = make_tap(lambda rows: Corrected(rows.behavior_logps, weights))
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5)], composed=True)
    inputs = batch(ids, ref_per_token_logps=torch.full((3, WIDTH), -4.0))
    logps = logps_of(3)
    loss = run(tap, inputs, logps)
    assert loss.seen["advantages"].tolist() == [*weights.tolist(), [1.0] * 3]
    assert loss.seen["old_per_token_logps"][1].tolist() == [-5.0] * 3, "the row's ratio counts in its sequence's"
    assert loss.seen["ref_per_token_logps"][1].tolist() == [-4.0, -4.0, logps[1, 2].item()]
    tap = make_tap(lambda rows: Corrected(rows.behavior_logps, weights), token_weights=False)
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5)], composed=True)
    with pytest.raises(ResultError, match="set importance_sampling_level='token'"):
        run(tap, batch(ids), logps)


def test_advantages_of_each_token_are_the_stored_ones_for_the_correction() -> None:
    seen: list[ReplayedRows] = []

    def halved(rows: ReplayedRows) -> Corrected:
        seen.append(rows)
        return Corrected(rows.behavior_logps, torch.full((2,), 0.5))

    tap = make_tap(halved)
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5, (1.5, -0.5))], composed=True)
    inputs = batch(ids)
    inputs["advantages"] = torch.arange(9.0).view(3, WIDTH)
    loss = run(tap, inputs, logps_of(3))
    assert seen[0].advantages.tolist() == [1.5, -0.5]
    assert loss.seen["advantages"].tolist() == [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5], [6.0, 7.0, 8.0]]


# masking


def test_masked_rows_lose_policy_kl_and_entropy() -> None:
    tap = make_tap()
    mask = RowMask([2, 3])
    ids = tap.expect(4, [candidate(0, 0)], [], composed=False, row_mask=mask)
    assert ids.tolist() == [[1, 0], [2, 0], [0, 2], [0, 2]]
    logps = logps_of(4)
    entropies = torch.ones(4, WIDTH, requires_grad=True) * 2
    given = {"old_per_token_logps": torch.full((4, WIDTH), -3.0), "ref_per_token_logps": torch.full((4, WIDTH), -4.0)}
    loss = run(tap, batch(ids, **given), logps, entropies)
    assert loss.seen["advantages"].tolist() == [1.0, 1.0, 0.0, 0.0]
    for key, value in given.items():
        assert torch.equal(loss.seen[key], torch.cat([value[:2], logps[2:]])), key
    (gradient,) = torch.autograd.grad(loss.result[1].sum(), entropies)
    assert gradient.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_a_batch_may_have_replayed_rows_and_masked_ones() -> None:
    tap = make_tap(lambda rows: Corrected(rows.behavior_logps, torch.tensor([0.0, 1.0])))
    ids = tap.expect(4, [], [placement(0, [-5.0] * 5)], composed=True, row_mask=RowMask([2, 3]))
    assert ids.tolist() == [[-1, 1], [-2, 1], [0, 3], [0, 3]]
    entropies = torch.ones(4, WIDTH, requires_grad=True) * 2
    loss = run(tap, batch(ids), logps_of(4), entropies)
    assert loss.seen["advantages"].tolist() == [0.0, 1.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.result[1].sum(), entropies)
    assert gradient.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_excluded_rows_scale_the_loss_and_not_its_auxiliary_part() -> None:
    tap = make_tap()
    mask = RowMask([2, 3], [2, 3], factor=2.0, denominator="rows")
    ids = tap.expect(4, [], [], composed=False, row_mask=mask)
    auxiliary = torch.tensor(3.0, requires_grad=True)
    loss = Loss(tap, logps_of(4), None, auxiliary)
    scaled = tap.loss(loss, batch(ids))
    assert float(scaled.detach()) == pytest.approx(2.0 * float(logps_of(4).sum()))
    assert float(loss.result[2].detach()) == 1.5


# what is refused


def test_replayed_rows_of_an_earlier_batch_are_refused() -> None:
    tap = make_tap()
    earlier = tap.expect(4, [], [placement(0, [-5.0] * 5)], composed=True)
    now = tap.expect(4, [], [placement(0, [-6.0] * 5), placement(2, [-7.0] * 5)], composed=True)
    assert not set(earlier[:2, 0].tolist()) & set(now[:, 0].tolist()), "ids are never given twice"
    with pytest.raises(SeamError, match="replayed rows of an earlier generation batch"):
        run(tap, batch(earlier), logps_of(4))
    later = now.clone()
    later[:, 0] -= 4
    with pytest.raises(SeamError, match="replayed rows of an earlier generation batch"):
        run(tap, batch(later), logps_of(4))
    assert run(tap, batch(now), logps_of(4)).seen["old_per_token_logps"][0].tolist()[:2] == [-6.0, -6.0]


def test_a_loss_that_goes_around_the_tap_is_refused() -> None:
    tap = make_tap()
    ids = tap.expect(2, [], [], composed=False)
    with pytest.raises(SeamError, match=r"never called .* with gradients"):
        tap.loss(lambda micro: micro.get("old_per_token_logps"), batch(ids))
    with pytest.raises(SeamError, match=r"never called .* with gradients"):
        tap.loss(lambda micro: tap.logps((logps_of(2), None)), batch(ids))
    with pytest.raises(SeamError, match="did not read 'old_per_token_logps'"):
        tap.loss(lambda micro: tap.logps((logps_of(2).requires_grad_(), None))[0].sum(), batch(ids))

    def early(micro: Any) -> torch.Tensor:
        micro.get("old_per_token_logps")
        return tap.logps((logps_of(2).requires_grad_(), None))[0].sum()

    with pytest.raises(SeamError, match="did not read 'old_per_token_logps'"):
        tap.loss(early, batch(ids))
    assert not tap.handshake.verified
    assert run(tap, batch(ids), logps_of(2)).seen
    assert tap.handshake.verified


def test_where_every_batch_gets_a_forward_the_loss_need_only_read() -> None:
    tap = make_tap(forward=True)
    ids = tap.expect(2, [], [], composed=False)
    read = {"old_per_token_logps": torch.zeros(2, WIDTH)}
    tap.loss(lambda micro: micro["old_per_token_logps"].sum(), batch(ids, **read))
    assert tap.handshake.verified


def broken(rows: ReplayedRows) -> Corrected:
    raise ZeroDivisionError("no luck")


def test_an_error_is_raised_at_once_on_one_process_and_kept_on_several() -> None:
    tap = make_tap(broken)
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5)], composed=True)
    with pytest.raises(ZeroDivisionError):
        run(tap, batch(ids), logps_of(3))
    errors = KeptErrors(alone=False)
    tap = make_tap(broken, errors=errors)
    ids = tap.expect(3, [], [placement(0, [-5.0] * 5)], composed=True)
    loss = run(tap, batch(ids), logps_of(3))
    assert loss.seen["advantages"].tolist() == [0.0, 0.0, 1.0], "until all have heard of it the rows train nothing"
    first = errors.first
    run(tap, batch(ids), logps_of(3))
    assert errors.first is first, "the first one counts"
    assert errors.take() is first
    assert errors.take() is None


def test_the_tap_is_closed_again_after_a_loss_that_failed() -> None:
    tap = make_tap()
    late = candidate(0, 0)
    ids = tap.expect(2, [late], [], composed=False)

    def failing(micro: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        tap.loss(failing, batch(ids))
    tap.logps((logps_of(2).requires_grad_(), None))
    assert late.records == [None, None]


def test_what_fails_on_completing_a_group_is_left_to_the_step_where_all_ranks_hear_of_it(monkeypatch: Any) -> None:
    def full(tensors: Any) -> Any:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(candidates, "begin", full)
    tensors = {"completion_ids": torch.arange(2 * WIDTH)}
    group = Group(tensors, frozenset(tensors), np.array([1]), np.array([WIDTH] * SIZE))
    waiting = Candidate(0, 0, group, frozenset(tensors), slice(0, SIZE), 0, leaves_device=True)
    tap = make_tap()
    ids = tap.expect(SIZE, [waiting], [], False)
    logps = torch.arange(-2.0 * WIDTH, 0).view(SIZE, WIDTH)
    run(tap, batch(ids), logps)
    run(tap, batch(ids), 2 * logps)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        waiting.complete()
    monkeypatch.undo()
    assert waiting.complete()
    payload = waiting.payload()
    assert payload is not None
    assert payload.tensors["old_per_token_logps"].tolist() == logps.flatten().tolist()
