"""Runs a prompt once for all its completions, in generation and in the loss, for models on a CPU.

GRPO's completions of a group have the same prompt. Where completions are short, most of a step's time is spent on
prompts. `share_prompts` makes a trainer run each prompt of a batch once: the distribution of completions, their
log-probs, and their gradients are those of the model itself, which tests/docs/test_benchmarks.py shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import __version__
from transformers.utils import ModelOutput

CACHE = "cache" if Version(__version__) >= Version("5.24") else "past_key_values"
"""What models call their cache, as an argument and in what they return; transformers 5.24.0 renamed it."""


@dataclass
class Scored(ModelOutput):
    """What TRL reads of a model with `fused_lm_head=True`: float `[rows, columns]` each."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def _prompts(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Different prompts, their masks, and for each row which of them it has."""
    both, which = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    return both[:, : ids.shape[1]], both[:, ids.shape[1] :], which


def scored(model: Any, ids: Tensor, mask: Tensor, start: int) -> Scored:
    """Log-probs and entropies of the tokens from column `start` on; 0 before it and where the mask is 0."""
    prompts, prompt_mask, which = _prompts(ids[:, :start], mask[:, :start])
    inputs = ids[:, start:-1]
    # One look-up for both, as its gradient has the size of the whole vocabulary.
    embedded = model.get_input_embeddings()(torch.cat([prompts.flatten(), inputs.flatten()]))
    of_prompts, of_inputs = embedded.split([prompts.numel(), inputs.numel()])
    begun = model.base_model(
        inputs_embeds=of_prompts.view(*prompts.shape, -1), attention_mask=prompt_mask, use_cache=True
    )
    hidden = begun.last_hidden_state[which, -1:]
    if inputs.numel():
        getattr(begun, CACHE).batch_select_indices(which)
        more = model.base_model(
            inputs_embeds=of_inputs.view(*inputs.shape, -1),
            attention_mask=mask[:, :-1],
            **{CACHE: getattr(begun, CACHE)},
        )
        hidden = torch.cat([hidden, more.last_hidden_state], dim=1)
    kept = mask[:, start:].bool()
    spread = model.get_output_embeddings()(hidden[kept]).float().log_softmax(dim=-1)
    taken = spread.gather(1, ids[:, start:][kept][:, None])[:, 0]
    entropy = -(spread.exp() * spread).sum(dim=-1)
    whole = torch.nn.functional.pad(kept, (start, 0))
    zeros = torch.zeros(ids.shape, dtype=taken.dtype, device=ids.device)
    return Scored(zeros.masked_scatter(whole, taken), zeros.masked_scatter(whole, entropy))


def _drawn(logits: Tensor) -> Tensor:
    """One token a row, at temperature 1. `torch.multinomial` draws a number a token instead of one a row."""
    sums = logits.softmax(dim=-1).double().cumsum(dim=-1)
    drawn = torch.rand(len(sums), 1, dtype=torch.double, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


@torch.no_grad()
def sampled(
    model: Any, ids: Tensor, mask: Tensor, tokens: int, eos: Tensor, pad: int, greedy: Tensor | None = None
) -> Tensor:
    """Prompts and completions, `[rows, columns + tokens]` or less; after `eos` comes `pad`.

    At temperature 1, or the likeliest tokens in rows where `greedy`, bool `[rows]`, is true.
    """
    prompts, prompt_mask, which = _prompts(ids, mask)
    begun = model.base_model(input_ids=prompts, attention_mask=prompt_mask, use_cache=True)
    cache, hidden = getattr(begun, CACHE), begun.last_hidden_state[which, -1]
    cache.batch_select_indices(which)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    while True:
        logits = model.get_output_embeddings()(hidden).float()
        one = _drawn(logits)
        if greedy is not None:
            one = one.where(~greedy, logits.argmax(dim=-1))
        one = one.masked_fill(ended, pad)
        ids = torch.cat([ids, one[:, None]], dim=1)
        mask = torch.cat([mask, (~ended).long()[:, None]], dim=1)
        ended |= torch.isin(one, eos)
        tokens -= 1
        if tokens == 0 or bool(ended.all()):
            return ids
        hidden = model.base_model(input_ids=one[:, None], attention_mask=mask, **{CACHE: cache}).last_hidden_state[
            :, -1
        ]


def share_prompts(trainer: Any) -> None:
    """Makes `trainer` run each prompt of a batch once. Before training; temperature 1 and no other sampling."""
    eos, pad = torch.tensor(trainer.eos_token_ids), trainer.processing_class.pad_token_id
    autocast = {"device_type": "cpu", "dtype": torch.bfloat16, "enabled": trainer.args.bf16}
    for model in (trainer.model, trainer.ref_model):
        if model is None:
            continue

        def forward(
            model: Any = model, plain: Any = model.forward, *, input_ids: Tensor, labels: Any = None, **given: Any
        ) -> Any:
            if labels is None:  # another's look at the model, not the loss
                return plain(input_ids=input_ids, **given)
            attention_mask = given.pop("attention_mask")
            assert given == {"fused_lm_head": True}, given
            with torch.autocast(**autocast):
                start = int((labels >= 0).any(dim=0).int().argmax())
                return scored(model, input_ids, attention_mask, start)

        model.forward = forward

    def generate(input_ids: Tensor, attention_mask: Tensor, **given: Any) -> Tensor:
        config = given.pop("generation_config")
        assert (given, config.temperature, config.top_p, config.top_k or 0) == ({}, 1.0, 1.0, 0), (given, config)
        with torch.autocast(**autocast):
            return sampled(trainer.model, input_ids, attention_mask, config.max_new_tokens, eos, pad)

    trainer.model.generate = generate
