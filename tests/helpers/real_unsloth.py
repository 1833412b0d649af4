"""Unsloth's own generated trainer, on a CPU: import this before trl and transformers.

What stands in for a GPU: Unsloth's switch for its CI, and the line that it then leaves out; what its loader puts on a
model; its compilers are off.
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

os.environ |= {
    "UNSLOTH_ALLOW_CPU": "1",
    "UNSLOTH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_GRPO_SEQ_PACKING": "0",  # whose self-check a tiny random model always passes
}
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())

import unsloth  # noqa: F401
from unsloth.models import rl
from unsloth.models.vision import FastBaseModel

rl._patch_trl_rl_trainers("grpo_trainer")

import torch
from loss_by_hand import forward, forward_alone
from peft import get_peft_model
from replaying import Checked, build, loadable_model, original
from scenarios import SCRIPT
from support import Read, Rewards

import trl_replay
from trl_replay.loss.supply import ROWS
from trl_replay.testing import make_model, make_tokenizer

PLAIN = {
    "optim": "adamw_torch", "gradient_accumulation_steps": 1, "beta": 0.0, "mask_truncated_completions": False,
    "epsilon_high": 0.2, "generation_kwargs": {"suppress_tokens": [make_tokenizer().pad_token_id]},
}  # fmt: skip
"""What Unsloth's configuration has other defaults for, and completions without pad tokens."""


def dressed(model):
    """The model with what Unsloth's loader would have put on it."""
    model.for_training = functools.partial(FastBaseModel.for_training, model)
    model.for_inference = functools.partial(FastBaseModel.for_inference, model)
    model._unsloth_user_float32 = True
    return model


class Followed(Checked):
    """Unsloth's trainer, which computes every training loss and its gradient a second time by hand."""

    gradients = True
    most_kl = 10.0  # of a token, Unsloth's own

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.watch is not None and self.model.training:
            logps = self.forward_by_hand([self.row(inputs, number) for number in range(len(inputs[ROWS]))], inputs)[0]
            padded = torch.nn.utils.rnn.pad_sequence([of_row.detach() for of_row in logps], batch_first=True)
            self.losses.append({"inputs": Read(inputs), "logps": padded})
            self.follow(inputs, loss)
        return loss

    def row(self, inputs: Any, number: int) -> dict[str, Any]:
        return original(inputs, number, self._tokenizer.pad_token_id)


def trainer_of(folder, rewards, **settings):
    """As `build`, of Unsloth's trainer, which gets a model with its adapter on it."""
    model = settings.pop("model", None)
    model = make_model(make_tokenizer()) if model is None else model
    adapter = settings.get("arguments", {}).pop("peft_config", None)
    model = dressed(model if adapter is None else get_peft_model(model, adapter))
    return build(folder, rewards, model=model, **{"trainer_class": Followed, **PLAIN, **settings})


def follow_scored(folder, **settings):
    """Compares what Unsloth scored, once it is laid out as TRL's, with the models' log-probs of each row alone."""
    settings = {"num_iterations": 2, "beta": 0.1, "learning_rate": 2e-2, **settings}
    trainer = trainer_of(folder, Rewards(*SCRIPT), model=loadable_model(folder), **settings)
    session = trl_replay.attach(trainer, replay_start=0)
    step, far = session.step.take, []

    def followed(batch, score=None):
        rows = [original(batch, row, trainer._tokenizer.pad_token_id) for row in range(len(batch["advantages"]))]
        own = forward_alone(trainer, rows)[0]
        ref = [
            forward(trainer, [row], {"prompt_ids": row["prompt"][None], "completion_ids": row["ids"][None]},
                    trainer.ref_model)[0][0]
            for row in rows
        ]  # fmt: skip
        for row, by_policy, by_reference in zip(rows, own, ref, strict=True):
            torch.testing.assert_close(row["old_per_token_logps"], by_policy, rtol=0, atol=1e-5)
            torch.testing.assert_close(row["ref_per_token_logps"], by_reference, rtol=0, atol=1e-5)
            far.append(float((by_policy - by_reference).abs().max()))
        return step(batch, score)

    session.step.take = followed  # type: ignore[method-assign]
    trainer.train()
    assert max(far) > 1e-2, "the policy hardly changed: the test says little"
