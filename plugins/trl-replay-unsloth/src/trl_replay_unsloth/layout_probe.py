"""Tries Unsloth's loss on a made-up micro-batch, before anything is replayed: is its layout the one that we know?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_replay import compat
from trl_replay.compat import OLD_LOGPS, REF_LOGPS
from trl_replay.errors import ContractError

from . import contract
from . import loss as unsloth
from .contract import left_packed

PROMPTS, COMPLETIONS = (4, 1, 2), (3, 2, 1)
"""Lengths of the made-up rows: every prompt has another padding."""
NEAR, NEAR_IN_HALF_PRECISION = 1e-2, 0.5
"""Farthest that Unsloth's log-probs may be from those of the plain model, which sees each row alone."""


def check_layout(trainer: Any) -> None:
    """Refuse a trainer of Unsloth's whose loss has another layout than the releases that were tested.

    The trainer, its model and the global generators are as before.

    Raises:
        ContractError: Names what is otherwise.
    """
    with _aside(trainer):
        seen, loss, batch = _try(trainer)
        differing = [*_differences(trainer, batch, seen)]
        if not differing and not _ignores_factors(loss, seen["new"]):
            differing = ["a factor on the loss reaches its gradient"]
    if differing:
        raise ContractError(
            f"Unsloth's loss is not laid out as in the releases that replay was tested with: {'; '.join(differing)}. "
            f"Install one of these ({contract.UNSLOTH_TESTED}), or train without replay (use_replay=False)."
        )


@contextmanager
def _aside(trainer: Any) -> Iterator[None]:
    """Leave no trace of what the loss notes on the trainer and its model, and draws; drop nothing out."""
    noted = [(vars(owner), dict(vars(owner))) for owner in (trainer, *trainer.model.modules())]
    compat.start_metrics_anew(trainer)
    trainer.model.eval()
    device = trainer.model.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            yield
    finally:
        for now, before in noted:
            now.clear()
            now.update(before)


def _try(trainer: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return what Unsloth's loss passed on of a made-up micro-batch, what it returned, and the micro-batch as TRL lays
    it out."""
    batch = _made_up(trainer)
    seen: dict[str, Any] = {}

    def apply(stock: Any, new: Any, old: Any, ref: Any, *rest: Any) -> Any:
        seen.update(new=new, old=old, ref=ref, ids=rest[2], mask=rest[3])
        return stock(new, old, ref, *rest)

    laid_out = unsloth.as_unsloth(trainer, batch)
    laid_out |= unsloth.packed(trainer, laid_out)
    with unsloth.applied(trainer, apply), trainer.compute_loss_context_manager():
        loss = getattr(trainer, contract.UNSLOTH_LOSS)(trainer.model, laid_out)
    return seen, loss, batch


def _made_up(trainer: Any) -> dict[str, Any]:
    pad, device = compat.tokenizer(trainer).pad_token_id, trainer.model.device
    known = [token for token in range(min(compat.vocabulary_size(trainer), 200)) if token != pad]
    ids = torch.tensor(known).roll(-len(known) // 2)
    most, longest, rows = max(PROMPTS), max(COMPLETIONS), len(PROMPTS)
    prompts, completions = torch.full((rows, most), pad), torch.full((rows, longest), pad)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        drawn = ids.roll(-7 * row).repeat(2)[: prompt + completion]
        prompts[row, most - prompt :], completions[row, :completion] = drawn[:prompt], drawn[prompt:]
    mask = (torch.arange(longest) < torch.tensor(COMPLETIONS).unsqueeze(1)).long()
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": (torch.arange(most).flip(0) < torch.tensor(PROMPTS).unsqueeze(1)).long(),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "num_items_in_batch": mask.sum(),
    }
    batch = {key: value.to(device) for key, value in batch.items()}
    own = _alone(trainer, batch)
    apart = torch.arange(own.numel(), device=device).view_as(own) / 100
    return {**batch, OLD_LOGPS: own - apart, REF_LOGPS: own + apart}


def _differences(trainer: Any, batch: dict[str, Any], seen: dict[str, Any]) -> Iterator[str]:
    """Yield what is not where we would look for it."""
    if not seen:
        yield f"{contract.UNSLOTH_APPLIED} was not called"
        return
    places, ids = left_packed(trainer, batch), batch["completion_ids"]
    width = ids.size(1) + places.most
    of_tokens = {name: value for name, value in seen.items() if torch.is_tensor(value)}
    if any(value.shape != (len(ids), width) for value in of_tokens.values()):
        yield f"widths are { {name: tuple(value.shape) for name, value in of_tokens.items()} }, not {width}"
        return
    if not torch.equal(places.unpack(seen["ids"])[places.real], ids[places.real]):
        yield "tokens of completions are in other columns"
    if not torch.equal(seen["mask"].long(), places.pack(batch["completion_mask"], width)):
        yield "the mask marks other tokens"
    for name, key in (("old", OLD_LOGPS), ("ref", REF_LOGPS)):
        if seen[name] is None or not torch.equal(seen[name].float(), places.pack(batch[key], width)):
            yield f"{key} does not arrive as it was given"
    off = (places.unpack(seen["new"].float()) - _alone(trainer, batch))[places.real].abs().max()
    if not off <= (NEAR if _in_single_precision(trainer, seen["new"]) else NEAR_IN_HALF_PRECISION):
        yield f"log-probs are off by {float(off):.2g} from those of the model"


def _in_single_precision(trainer: Any, values: torch.Tensor) -> bool:
    return trainer.model.dtype == values.dtype == torch.float32 and not compat.autocasts(trainer)


def _alone(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """`(b, C)`: log-probs of each row's completion by the model, without any padding."""
    logps = torch.zeros(batch["completion_ids"].shape, device=trainer.model.device)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = torch.cat([batch["prompt_ids"][row, -prompt:], batch["completion_ids"][row, :completion]])
        with torch.no_grad(), trainer.compute_loss_context_manager():
            logits = trainer.model(input_ids=ids[None]).logits[0, -completion - 1 : -1].float()
        given = (logits / trainer.temperature).log_softmax(dim=-1)
        logps[row, :completion] = given.gather(1, ids[-completion:, None]).squeeze(1)
    return logps


def _ignores_factors(loss: Any, new: torch.Tensor) -> bool:
    """Tell whether the gradient is the same whatever the loss is multiplied by."""
    once, twice = (torch.autograd.grad(loss * factor, new, retain_graph=True)[0] for factor in (1.0, 2.0))
    return bool(once.any()) and torch.equal(once, twice)
