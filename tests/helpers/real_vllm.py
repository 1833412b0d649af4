"""TRL's vLLM mode with the real engine, on a CPU: generation, weight sync and sampling log-probs are vLLM's own.

vLLM for CPUs is changed in one respect: it packs the weights of linear layers when it loads them and drops the
parameters, into which TRL writes. Here they stay parameters, as on a GPU. The engine runs eagerly, since compiling
takes minutes, and the trainers of one process share it: TRL syncs all weights before it generates for the first time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from loss_by_hand import forward_alone
from replaying import Checked, build, original

from trl_replay.testing import make_model, make_tokenizer

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def keep_parameters():
    """Makes vLLM multiply by the parameters themselves, not by a packed copy that a sync would not reach."""
    import torch
    from vllm.model_executor.layers import utils

    def as_they_are(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = as_they_are


def tiny_model(folder: Path) -> Any:
    """A Qwen2 with heads of 32 numbers, as vLLM's attention on a CPU needs, saved for vLLM to load.

    Its weights are large, so that rounding to 16 bits shows in the log-probs.
    """
    if not folder.exists():
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
        make_model(tokenizer, **shape).save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


class Engine:
    """Starts vLLM for the first trainer, and gives it to every later one."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **arguments: Any) -> None:
        import trl.generation.vllm_generation as generation

        self.folder = folder / "model"
        self.arguments = arguments
        self.asked: dict[str, Any] = {}
        self.llm: Any = None
        self.start_one = generation.LLM
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        keep_parameters()
        patch.setattr(generation, "LLM", self.start)

    def start(self, **asked):
        if self.llm is None:
            self.asked = asked
            self.llm = self.start_one(**{**asked, "enforce_eager": True, **self.arguments})
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]  # TRL sets them for vLLM; accelerate would take the next trainer for a launched one
        assert asked == self.asked, "another engine than the one that runs"
        return self.llm

    def trainer(self, output_dir: Path, rewards: Any, *rows: Any, **settings: Any) -> Any:
        """A trainer that computes its loss a second time by hand, and generates with the engine."""
        defaults = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "trainer_class": Checked}
        return build(output_dir, rewards, *rows, model=tiny_model(self.folder), **{**defaults, **settings})


class Followed(Checked):
    """Notes of every generation how far vLLM's log-probs are from those of this policy and of the first one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.near: list[float] = []
        self.far: list[float] = []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.near.append(self.distance(batch))
        self.model.load_state_dict(self.first)
        self.far.append(self.distance(batch))
        self.model.load_state_dict(now)
        return batch

    def distance(self, batch: Any) -> float:
        """The largest one between two log-probs of a sampled token: by vLLM, and by the model as it is."""
        rows = rows_of(batch)
        pairs = zip(forward_alone(self, rows)[0], rows, strict=True)
        return max(float((logps - row["sampling_per_token_logps"]).abs().max()) for logps, row in pairs)

    def check_policy(self):
        assert max(self.near) < 1e-4, "vLLM sampled from other weights than the policy's"
        assert self.far[-1] > 1e-2, "the policy hardly changed: the test says little"


def rows_of(batch: Any) -> list[dict[str, Any]]:
    return [original(batch, row, 0) for row in range(len(batch["advantages"]))]


def count_syncs(trainer: Any) -> list[int]:
    """The update of every weight sync."""
    sync, updates = trainer.vllm_generation.sync_weights, []

    def counted():
        updates.append(trainer.state.global_step)
        sync()

    trainer.vllm_generation.sync_weights = counted
    return updates
