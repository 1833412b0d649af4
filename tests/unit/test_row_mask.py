"""What the loss is multiplied by for groups that are excluded, and which gradients masked rows lose."""

from __future__ import annotations

import torch

from trl_replay.loss.row_mask import NOTHING_MASKED, RowMask

FLAGS = torch.tensor([0, 1, 6, 7])
"""A fresh row, one of a composed batch, and an excluded one of each."""
MICRO = {"completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])}


def test_a_loss_over_rows_is_scaled_alike_in_every_micro_batch() -> None:
    mask = RowMask([], [], 1.5, "rows")
    assert mask.scale(MICRO, FLAGS) == 1.5
    assert mask.scale(MICRO, torch.zeros(4, dtype=torch.int64)) == 1.5
    assert RowMask([], [], 1.0, "rows").scale(MICRO, FLAGS) is None


def test_a_loss_over_tokens_is_scaled_by_those_of_the_micro_batch() -> None:
    mask = RowMask([], [], 1.5, "tokens")
    assert float(mask.scale(MICRO, FLAGS)) == 9 / 4
    assert mask.scale(MICRO, torch.tensor([0, 1, 1, 0])) is None, "nothing is excluded here"
    assert mask.scale(MICRO, torch.tensor([2, 3, 2, 3])) is None, "masked rows that are not excluded stay in it"
    assert float(mask.scale(MICRO, torch.tensor([6, 6, 7, 7]))) == 1.0, "nothing is left"
    tools = {**MICRO, "tool_mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])}
    assert float(mask.scale(tools, FLAGS)) == 7 / 2


def test_a_loss_over_items_is_not_scaled() -> None:
    assert RowMask([0, 1], [0, 1], 1.5, "items").scale(MICRO, FLAGS) is None
    assert NOTHING_MASKED.scale(MICRO, FLAGS) is None


def test_masked_tokens_lose_the_gradient_of_their_entropy() -> None:
    logps = torch.zeros(2, 3, requires_grad=True)
    source = torch.ones(2, 3, requires_grad=True)
    masked = torch.tensor([[True, False, False], [True, True, True]])
    given, entropies = NOTHING_MASKED.returned((logps, source * 2), masked, None)
    assert given is logps
    assert entropies.tolist() == [[2.0] * 3] * 2, "their value stays"
    (gradient,) = torch.autograd.grad(entropies.sum(), source)
    assert gradient.tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]


def test_an_auxiliary_loss_is_divided_by_what_the_loss_is_multiplied_by() -> None:
    logps, auxiliary = torch.zeros(2, 3, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    entropies = torch.ones(2, 3, requires_grad=True)
    told = NOTHING_MASKED.returned((logps, entropies, auxiliary, "more"), None, 1.5)
    assert told[1] is entropies
    assert float(told[2].detach()) == 2.0
    assert told[3] == "more"
    masked = torch.ones(2, 1, dtype=torch.bool)
    assert NOTHING_MASKED.returned((logps, None, auxiliary), masked, None)[2] is auxiliary


def test_what_needs_no_change_is_returned_as_it_is() -> None:
    result = (torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True))
    assert NOTHING_MASKED.returned(result, None, None) is result
    plain = torch.ones(2, 3)
    masked = torch.ones(2, 1, dtype=torch.bool)
    assert NOTHING_MASKED.returned((result[0], plain), masked, 2.0)[1] is plain, "it has no gradient to lose"
