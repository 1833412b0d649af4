"""Tries the trainer's own model once, at attach: how far a row's log-probs move at equal weights.

Replay divides by log-probs that were computed in a batch of another shape. Where those of a made-up row differ between
shapes, rounding does it (in bfloat16 a token's by some 0.03 nats), or the model reads the padding before a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import compat
from ..loss.bounds import Noise

PROMPT, TOKENS, PADDING = 4, 64, 3
"""Of the made-up row; pad tokens before it."""
RISES = 3.0
"""So many times the difference that neighbors make is more than rounding."""
LEAST, LEAST_IN_HALF_PRECISION = 1e-4, 0.25
"""Mean differences, in nats, below which padding is not told from rounding: in bfloat16, that of Gemma 3 270M is 0.11,
and in single precision 1e-5."""
NAMES = ("wpe", "embed_positions", "position_embeddings")
"""Modules of learned positions, in the models of transformers."""


class Trial(NamedTuple):
    """What was found.

    Attributes:
        noise ([`Noise`], *optional*): What log-probs differ by at equal weights; None where it was not tried.
        reads_padding (`bool`): Whether the model reads where in its row a token stands, or the pad tokens before it.
        failed (`str`): What came in between.
        remedy (`str`): What turns dropout off, if there is any.
    """

    noise: Noise | None
    reads_padding: bool
    failed: str = ""
    remedy: str = ""


def try_model(trainer: Any, runs_model: bool = False) -> Trial:
    """Score a made-up row alone, among others, and behind padding; with dropout, twice.

    A model that can't be tried, that an engine runs (DeepSpeed, FSDP, or that of a layout that `runs_model`), or that
    a forward in eval mode would change (quantized, on a CPU), is judged by the names of its modules. The model and the
    global generators are as before.
    """
    model = trainer.model
    named = any(name.endswith(NAMES) for name, _ in model.named_modules())
    packs_weights = getattr(model, "is_quantized", False) and model.device.type == "cpu"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or runs_model or packs_weights:
        return Trial(None, named)
    try:
        return _tried(trainer, model)
    except Exception as error:  # models of any kind: what can't be tried here may train all the same
        return Trial(None, named, f"a made-up row fails with {type(error).__name__}: {error}".rstrip("."))


def _tried(trainer: Any, model: Any) -> Trial:
    row, other, pad = _made_up(trainer, model)
    with torch.no_grad(), trainer.accelerator.autocast(), _as_before(model):
        model.eval()
        alone = _Scored(trainer, [row])
        targets = alone.draw()

        def moved(alone: _Scored) -> tuple[torch.Tensor, torch.Tensor]:
            among, behind = _Scored(trainer, [row, other[PADDING:]]), _Scored(trainer, [pad + row, other], PADDING)
            here = alone.logps(targets)
            return among.logps(targets) - here, behind.logps(targets) - here

        neighbors, padding = moved(alone)
        both = torch.cat([neighbors, padding])
        single = model.dtype == torch.float32 and not hasattr(model, "_original_forward")  # which autocasts by itself
        if single and compat.autocasts(trainer):  # without, rounding hides less
            with torch.autocast(model.device.type, enabled=False):
                neighbors, padding = moved(_Scored(trainer, [row]))
        dropout = torch.zeros(1)
        remedy = _without_dropout(model)
        if remedy:
            model.train()
            both = dropout = _Scored(trainer, [row]).logps(targets) - _Scored(trainer, [row]).logps(targets)
    least = LEAST if single else LEAST_IN_HALF_PRECISION
    most = max(least, RISES * float(neighbors.abs().mean()))
    reads = float(padding.abs().mean()) > most
    size, length = both.abs(), trainer.args.max_completion_length or TOKENS
    noise = Noise(float(size.mean()), float(size.max()), length, float(dropout.abs().mean()))
    return Trial(noise, reads, remedy=remedy)


class _Scored:
    """A forward of rows of one width, the first of which is the made-up one behind some padding."""

    def __init__(self, trainer: Any, rows: list[list[int]], padding: int = 0) -> None:
        model = trainer.model
        ids = torch.tensor(rows, device=model.device)
        real = torch.ones_like(ids)
        real[0, :padding] = 0
        out = model(input_ids=ids, attention_mask=real, use_cache=False)
        self._spread = (out.logits[0, padding:].float() / trainer.temperature).log_softmax(dim=-1)

    def draw(self) -> torch.Tensor:
        """Tokens as the model would sample them, `(T,)`: the log-probs of others are of no concern."""
        chances = self._spread[PROMPT:].exp().cpu()
        return torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(0)).to(self._spread.device)[:, 0]

    def logps(self, targets: torch.Tensor) -> torch.Tensor:
        """Their log-probs, `(T,)`."""
        taken: torch.Tensor = self._spread[PROMPT:].gather(1, targets[:, None])[:, 0].cpu()
        return taken


def _made_up(trainer: Any, model: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the row, a longer one beside it, and pad tokens, the same at each call."""
    tokenizer = compat.tokenizer(trainer)
    special = {*tokenizer.all_special_ids, tokenizer.pad_token_id}
    known = [token for token in range(compat.vocabulary_size(trainer)) if token not in special]
    places = getattr(model.config, "max_position_embeddings", None) or math.inf
    length = int(min(PROMPT + TOKENS, places - PADDING))
    drawn = torch.randint(len(known), (2 * length + PADDING,), generator=torch.Generator().manual_seed(0))
    tokens = [known[number] for number in drawn.tolist()]
    return tokens[:length], tokens[length:], [tokenizer.pad_token_id] * PADDING


def _without_dropout(model: Any) -> str:
    """Say how to turn off what a training forward may drop; nothing if that is nothing."""
    modules = any(getattr(module, "p", 0) for module in model.modules() if "Dropout" in type(module).__name__)
    config = model.config.to_dict() if hasattr(model, "config") else {}
    named = {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, float) and value > 0}
    remedies = ["disable_dropout=True in GRPOConfig (LoRA's included)"] if modules else []
    remedies += [f"{named} in the model's config (model_init_kwargs)"] if named else []
    return " and ".join(remedies)


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Leave the modes of modules and the generators as they are now."""
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        for module, trains in training:
            module.training = trains
