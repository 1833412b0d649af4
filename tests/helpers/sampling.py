"""What stands in for vLLM."""

from __future__ import annotations

import copy

import torch
from loss_by_hand import forward
from releases import SCORES_EVERY_TOKEN

LENGTHS = [5, 2, 4, 1, 3, 6, 2]
"""Tokens of completions."""


class StandIn:
    """In the place of vLLM behind the trainer's own vLLM code path: completions of given lengths, with log-probs.

    Tokens are random, but as vLLM's, a completion that is shorter than the limit ends with eos. Log-probs are of the
    weights of the last sync, differ a little from the trainer's, and every fifth is missing (TRL turns NaN into None,
    and back).
    """

    def __init__(self, trainer, lengths, missing=not SCORES_EVERY_TOKEN):
        self.trainer = trainer
        self.lengths = lengths
        self.missing = missing
        self.syncs = 0
        self.model = copy.deepcopy(trainer.model)
        self.generator = torch.Generator().manual_seed(7)
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, self, -1

    def sync_weights(self):
        self.syncs += 1
        self.model.load_state_dict(self.trainer.model.state_dict())

    def generate(self, prompts, images, num_generations, profiler):
        rows = []
        for number, prompt in enumerate(prompts):
            length = self.lengths[number % len(self.lengths)]
            ids = torch.randint(3, 40, (length,), generator=self.generator)
            if length < self.trainer.max_completion_length:
                ids[-1] = self.trainer._tokenizer.eos_token_id
            rows.append({"prompt": torch.tensor(prompt), "ids": ids, "attention": torch.ones(length)})
        widths = {
            "prompt_ids": torch.zeros(1, max(len(row["prompt"]) for row in rows)),
            "completion_ids": torch.zeros(1, max(len(row["ids"]) for row in rows)),
        }
        logps, _, _ = forward(self.trainer, rows, widths, model=self.model)
        noise = [torch.randn(len(row), generator=self.generator) * 0.2 for row in logps]
        reported = [(row + extra).tolist() for row, extra in zip(logps, noise, strict=True)]
        if self.missing:
            reported = [[None if (i + j) % 5 == 4 else x for j, x in enumerate(row)] for i, row in enumerate(reported)]
        ids = [row["ids"].tolist() for row in rows]
        return prompts, ids, [[[value] for value in row] for row in reported], [[[one] for one in row] for row in ids]
