# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""GRPO with a replay buffer: TRL's own training script (`trl grpo`) plus three lines.

    python examples/grpo_replay.py --config examples/grpo_replay.yaml
    python examples/grpo_replay.py --config examples/grpo_replay.yaml --replay_evictor reservoir --replay_max_age 50
    python examples/grpo_replay.py --config examples/grpo_replay.yaml --use_replay false    # stock GRPO

Every setting of GRPOConfig, ModelConfig and ReplayConfig is a flag and a YAML key; a flag wins over the YAML file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl.rewards
from datasets import DatasetDict, load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from trl_replay import ReplayConfig, attach

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """
    Script arguments, besides those of TRL (`dataset_name`, `dataset_config`, `dataset_train_split`, …).

    Args:
        reward_funcs (`list[str]`, *optional*, defaults to `["accuracy_reward"]`):
            Reward functions: names from `trl.rewards`, or dotted import paths such as `my_rewards.exact_match`, found
            from the working directory too.
    """

    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy_reward"],
        metadata={
            "help": "Reward functions: names from trl.rewards, or dotted import paths (my_rewards.exact_match)."
        },
    )


def find_reward(name: str) -> Callable[..., list[float | None]]:
    """The reward function that a name or a dotted import path stands for."""
    module, _, attribute = name.rpartition(".")
    if not module:
        if name not in trl.rewards.__all__:
            raise ValueError(
                f"reward_funcs: trl.rewards has no {name!r}. It has: {', '.join(sorted(trl.rewards.__all__))}. Your "
                "own functions are named by their import path, such as my_rewards.exact_match."
            )
        return getattr(trl.rewards, name)
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), attribute)


def find_dataset(arguments: ScriptArguments) -> DatasetDict:
    """A data set on the hub, or a local file (JSON, JSON lines, parquet, CSV) or folder of such files."""
    name = arguments.dataset_name
    if not name:
        raise ValueError("Give dataset_name: a data set on the hub, or a local file or folder.")
    if Path(name).is_file():
        suffix = Path(name).suffix
        if suffix not in FORMATS:
            raise ValueError(f"dataset_name={name!r} ends in {suffix!r}; files of {', '.join(FORMATS)} can be read.")
        return load_dataset(FORMATS[suffix], data_files={arguments.dataset_train_split: name})
    return load_dataset(name, name=arguments.dataset_config)


def main(
    script_args: GRPOScriptArguments, training_args: GRPOConfig, model_args: ModelConfig, replay_args: ReplayConfig
) -> None:
    """Trains and saves."""
    model_init_kwargs: dict[str, Any] = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = model_init_kwargs | (training_args.model_init_kwargs or {})
    dataset = find_dataset(script_args)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[find_reward(name) for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    attach(trainer, replay_args)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, ReplayConfig))
    main(*parser.parse_args_and_config())
