"""Every setting of `GRPOConfig` is in a test: those that a CPU can run are held against the loss by hand."""

import dataclasses
import re
from pathlib import Path

import pytest
from scenarios import Scenario, follow
from transformers import TrainingArguments
from trl import GRPOConfig

FIELDS = {field.name for field in dataclasses.fields(GRPOConfig)} - {
    field.name for field in dataclasses.fields(TrainingArguments)
}
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0, "entropy_coef_delta": 0.5}
TABLE = {
    "those of generation": {
        "top_k": 5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3, "cache_implementation": "dynamic",
        "ds3_gather_for_generation": False,
    },
    "those of the model": {"disable_dropout": True, "cast_lm_head_to_fp32": True},
    "temperatures of sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.4, "sapo_temperature_pos": 0.8},
    "vespo": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.0,
    },
    "the least of an entropy bonus": {**ENTROPY, "entropy_target": 0.1, "entropy_coef_min": 0.005},
    "the most of an entropy bonus": {**ENTROPY, "entropy_coef_max": 0.02},
    "printed completions": {
        "log_completions": True, "num_completions_to_print": 2, "log_unique_prompts": True, "log_multimodal": False,
    },
}  # fmt: skip
"""Those of no other table of losses by hand."""
NOT_HERE = {
    "a hub's model, which the trainer loads before anything is attached": ("model_init_kwargs", "trust_remote_code"),
    "evaluation, which replay leaves as it is": ("num_generations_eval",),
    "generation with tools; tests of tools take its completions": ("max_tool_calling_iterations",),
    "a reference that is synced, which stored KL terms refuse": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "needs a network": ("log_completions_hub_repo",),
    "takes 10 GB of memory": ("use_transformers_paged",),
    "needs a GPU": ("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
    "needs vLLM; tests/with_vllm takes its completions": (
        "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_host",
        "vllm_server_port", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
    ),
}  # fmt: skip
"""Why settings are in no test."""


@pytest.mark.parametrize("name", TABLE)
def test_188_the_loss_is_that_by_hand_with_the_settings_of_the_trainer(tmp_path, name):
    missing = TABLE[name].keys() - {field.name for field in dataclasses.fields(GRPOConfig)}
    if missing:
        pytest.skip(f"this TRL release has no {', '.join(sorted(missing))}")
    follow(tmp_path, Scenario(TABLE[name], {}))


def test_188_every_setting_of_the_trainer_is_in_a_test_or_has_a_reason():
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    set_in = {name for name in FIELDS if re.search(rf"\b{name}\"?\s*[=:]", tests)}
    excused = {name for names in NOT_HERE.values() for name in names}
    assert FIELDS - set_in - excused == set()
    assert set_in & excused == set(), "set in a test now"
