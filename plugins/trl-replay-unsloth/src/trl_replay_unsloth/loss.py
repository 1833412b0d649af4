"""Unsloth's loss: where the tap finds the policy's log-probs there, and in which layout it leaves the others.

Unsloth's GRPO trainer makes its loss from a forward of its own, in which prompts are packed left, and so are what it
calls old and reference log-probs. Between scoring and the loss the batch has TRL's layout, as everything else here
expects; only while a loss runs is it Unsloth's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from trl_replay.compat import OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS
from trl_replay.data.types import Batch
from trl_replay.errors import BatchError
from trl_replay.loss.tap import Tap
from trl_replay.session import Session

from . import contract
from .contract import left_packed

TEXT = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
"""Keys of a batch of texts; log-probs and Unsloth's own key may come with them."""


class ScaledGradient(torch.autograd.Function):
    """A factor on the gradient alone: Unsloth's loss has its gradient from the forward, whatever multiplies it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: Any) -> torch.Tensor:
        """Return the values as they are."""
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply the gradient."""
        return gradient * ctx.factor, None


def as_trl(trainer: Any, batch: Batch) -> Batch:
    """The batch that Unsloth scored, laid out as TRL's.

    Raises:
        BatchError: It holds something that replay was not tested with in this layout.
    """
    for key in batch:
        if key not in TEXT | {OLD_LOGPS, REF_LOGPS, contract.UNSLOTH_LEFT_PAD} and batch[key] is not None:
            raise BatchError(
                f"Unsloth's batch holds {key!r}, with which replay was not tested there: train on plain text and "
                "without Unsloth's own switches, or without replay (use_replay=False)."
            )
    if batch["advantages"].dim() != 1:
        raise BatchError(
            "Replay was not tested with Unsloth's trainer and an advantage for each token: give rows one each, or "
            "train without replay (use_replay=False)."
        )
    places = left_packed(trainer, batch)
    batch = {key: value for key, value in batch.items() if key != contract.UNSLOTH_LEFT_PAD}
    return {**batch, **{key: places.unpack(value.clone()) for key, value in _packable(batch).items()}}


def as_unsloth(trainer: Any, batch: Batch) -> Batch:
    """The composed batch with Unsloth's own key. Its log-probs are packed in the loss."""
    rows = len(batch["prompt_ids"])
    return {**batch, contract.UNSLOTH_LEFT_PAD: torch.full((rows, 1), left_packed(trainer, batch).most)}


def packed(trainer: Any, micro: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A micro-batch's old and reference log-probs as Unsloth's loss reads them, which takes M from their width."""
    places = left_packed(trainer, micro)
    of_batch = micro.get(contract.UNSLOTH_LEFT_PAD)
    width = micro["completion_ids"].size(1) + (places.most if of_batch is None else int(of_batch.max()))
    return {key: places.pack(value, width) for key, value in _packable(micro).items()}


def _packable(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: batch[key] for key in (OLD_LOGPS, REF_LOGPS) if batch.get(key) is not None}


@contextmanager
def applied(trainer: Any, apply: Callable[..., Any]) -> Iterator[None]:
    """Have Unsloth's loss call `apply(stock, *args)` in the place of its own `apply`."""
    names = contract.unsloth_names(type(trainer))
    stock = names[contract.UNSLOTH_APPLIED]
    names[contract.UNSLOTH_APPLIED] = SimpleNamespace(apply=partial(apply, stock.apply))
    try:
        yield
    finally:
        names[contract.UNSLOTH_APPLIED] = stock


def around(
    session: Session, trainer: Any, stock: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """What the seam puts around Unsloth's loss."""

    def plain(micro: Any) -> Any:
        return stock(model, micro, *args, **kwargs)

    tap = session.step.tap
    if not tap.opens(inputs, trainer.model.training):
        return plain(inputs)
    return tap.loss(tapped(tap, trainer, plain), inputs)


def tapped(tap: Tap, trainer: Any, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The stock loss on a copy of its batch, with the tap where it has the policy's log-probs."""

    def loss(inputs: Batch) -> Any:
        micro = tap.reading
        assert micro is not None
        micro.batch = batch = dict(inputs)
        places = left_packed(trainer, batch)
        as_trls = _packable(batch)
        batch.update(packed(trainer, batch))
        batch["completion_mask"] = batch["completion_mask"] * places.real  # as Unsloth's own mask, made of ids

        def apply(stock_apply: Any, new: Any, old: Any, ref: Any, sampling: Any, *rest: Any) -> Any:
            head, ids, mask, _, *others = rest
            batch.update(as_trls)
            tap.logps(micro, (places.unpack(new),))

            def pack(values: Any) -> Any:
                return None if values is None else places.pack(values, new.size(1))

            old, ref, sampling = (pack(micro.peek(key)) for key in (OLD_LOGPS, REF_LOGPS, SAMPLING_LOGPS))
            advantages = micro.peek("advantages")
            advantages = advantages if advantages.dim() == 1 else pack(advantages)
            scale = tap.scale(micro)
            if scale is not None:
                new = ScaledGradient.apply(new, scale)  # type: ignore[no-untyped-call]
            return stock_apply(new, old, ref, sampling, head, ids, mask, advantages, *others)

        with applied(trainer, apply):
            return stock(batch)

    return lambda inputs: tap.part(loss, None, inputs, is_stock=True)
