"""The combination lock of `trl-replay demo`, and its trainer for other toy tasks."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from trl_replay import demo
from trl_replay.demo import HIDDEN_SIZE, codes, reward, taught
from trl_replay.testing import make_tokenizer


def toy_trainer(model: Any, rows: list[dict[str, str]], output_dir: str, *given: Any, **settings: Any) -> Any:
    """The demo's trainer on another task; with `beta`, the model is saved where the trainer finds its reference."""
    if settings.get("beta"):
        model.save_pretrained(f"{output_dir}/reference")
        make_tokenizer().save_pretrained(f"{output_dir}/reference")
        model = AutoModelForCausalLM.from_pretrained(f"{output_dir}/reference")
    return demo.toy_trainer(model, rows, output_dir, *given, **settings)


def make_trainer(
    seed: int, learning_rate: float, steps: int, output_dir: str, rewards: Any = reward, **training: Any
) -> Any:
    """The demo's trainer on the lock: 8 groups of 8 completions an update. `training` are settings of `GRPOConfig`."""
    model = demo.make_model(make_tokenizer(), HIDDEN_SIZE)
    model.load_state_dict(taught(seed))
    rows = [{"prompt": f"{key}=", "answer": code} for key, code in codes(seed).items()] * 2000
    plain = {"seed": seed, "learning_rate": learning_rate, "max_steps": steps, "max_completion_length": 3}
    return toy_trainer(model, rows, output_dir, rewards, **plain, **training)
