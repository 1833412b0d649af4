"""Models: adapters, checkpointed activations, autocast, weights in bfloat16, compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from releases import INTERPRETED
from replaying import build, replay
from support import DEAD, HALF, LIVE, Rewards

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])


def test_replay_goes_with_lora_dropout(tmp_path: Any) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    trainer = build(tmp_path, Rewards(*SCRIPT), arguments={"peft_config": adapter})
    trainer.independent = False
    replay(trainer)


def test_replay_is_right_with_gradient_checkpointing(tmp_path: Any) -> None:
    replay(build(tmp_path, Rewards(*SCRIPT), gradient_checkpointing=True))


def test_replay_is_right_under_bfloat16_autocast(tmp_path: Any) -> None:
    trainer = build(tmp_path, Rewards(*SCRIPT), bf16=True, learning_rate=3e-2)
    trainer.independent = False  # a second forward outside autocast would round elsewhere
    session, _ = replay(trainer)
    assert session.metrics["replay/ratio_mean"] != 1.0


@pytest.mark.skipif(INTERPRETED, reason="PyTorch can't compile a kernel that Triton interprets")
@pytest.mark.filterwarnings("ignore")
def test_replay_is_right_with_a_compiled_model(tmp_path: Any) -> None:
    """With the eager backend: inductor needs a C++ compiler. While it traces, warnings are torch's own."""
    trainer = build(tmp_path, Rewards(*SCRIPT), torch_compile=True, torch_compile_backend="eager", max_steps=3)
    replay(trainer)


def test_bfloat16_weights_store_log_probs_as_they_were_computed(tmp_path: Any) -> None:
    from trl_replay.testing import make_model, make_tokenizer

    model = make_model(make_tokenizer()).to(torch.bfloat16)
    trainer = build(tmp_path, Rewards(*SCRIPT), model=model)
    trainer.independent = False
    replay(trainer)
