"""Tries once, at attach, whether a row's log-probs change with the padding before its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import compat

TOKENS, PADDING = 4, 3
"""Of the made-up row."""
NEAR, NEAR_IN_HALF_PRECISION = 1e-2, 0.5
"""Distances of log-probs that rounding leaves."""
NAMES = ("wpe", "embed_positions", "position_embeddings")
"""Modules of learned positions, in the models of transformers."""


def changes_with_padding(trainer: Any) -> bool:
    """Tell whether the model reads where in its row a token stands, or the pad tokens before it.

    The same tokens stand in two rows, before the padding and after it. Learned positions show in the embeddings, which
    are otherwise equal bit for bit; anything else in the log-probs. A model that can't be tried is judged by the names
    of its modules. The model and the global generators are as before.
    """
    model = trainer.model
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or compat.is_unsloth(trainer)):
        try:
            return _differs(trainer, model)
        except Exception:  # models of any kind: what can't be tried here may train all the same
            pass
    return any(name.endswith(NAMES) for name, _ in model.named_modules())


def _differs(trainer: Any, model: Any) -> bool:
    pad, device = compat.tokenizer(trainer).pad_token_id, model.device
    known = [token for token in range(compat.vocabulary_size(trainer)) if token != pad][-TOKENS:]
    tokens = torch.tensor(known, device=device)
    padding = torch.full((PADDING,), pad, device=device)
    ids = torch.stack([torch.cat([padding, tokens]), torch.cat([tokens, padding])])
    real = torch.ones_like(ids)
    real[0, :PADDING] = real[1, TOKENS:] = 0
    with _in_evaluation(model), torch.no_grad(), trainer.compute_loss_context_manager():
        out = model(input_ids=ids, attention_mask=real, output_hidden_states=True, use_cache=False)
    logps = out.logits.float().log_softmax(dim=-1)
    after, before = (values.gather(1, tokens.unsqueeze(1)) for values in (logps[0, PADDING:], logps[1, :TOKENS]))
    single = model.dtype == out.logits.dtype == torch.float32 and not compat.autocasts(trainer)
    near = NEAR if single else NEAR_IN_HALF_PRECISION
    embedded = out.hidden_states[0]
    return bool((after - before).abs().max() > near) or not torch.equal(embedded[0, PADDING:], embedded[1, :TOKENS])


@contextmanager
def _in_evaluation(model: Any) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            model.eval()
            yield
    finally:
        for module, trains in training:
            module.training = trains
