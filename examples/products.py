# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""A fixed list of prompts, trained with stock GRPO and with the preset `sample_efficient`.

    python examples/products.py
    python examples/products.py --model Qwen/Qwen2.5-1.5B --learning-rates 1e-6 3e-6

The list is *products* of the README: 24 numbers, each to be written as a product of two factors. Both arms generate
as many completions, 16 a batch, and train at the learning rates that a pilot chose for this model. Of each arm it
prints which percentage of the completions was right, by pass over the list.
"""

import argparse
import re

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_replay import attach

NUMBERS = [12, 16, 18, 20, 24, 28, 30, 32, 36, 40, 42, 45, 48, 54, 56, 60, 63, 64, 66, 70, 72, 80, 84, 90]
SIZE = 16
"""Completions of a batch, all of one prompt."""
PASS = len(NUMBERS)
"""Batches of a pass over the list."""
ARMS = {
    "stock": ({}, {"use_replay": False}),
    "preset": ({"num_iterations": 2, "beta": 0.1}, {"replay_preset": "sample_efficient"}),
}
"""Settings of GRPOConfig, and of replay."""


def is_product(completions, number, **_):
    """1 if the first line is `a * b`, with factors above 1 whose product is the number; else 0."""
    rewards = []
    for text, product in zip(completions, number, strict=True):
        factors = re.match(r"\s*(\d{1,3}) *\* *(\d{1,3})\s*?\.?\s*?(\n|$)", text)
        a, b = map(int, factors.group(1, 2)) if factors else (1, 1)
        rewards.append(float(min(a, b) > 1 and a * b == product))
    return rewards


def train(arm, learning_rate, seed, options):
    """Which percentage of the completions was right, by pass over the list."""
    of_trainer, of_replay = ARMS[arm]
    cuda = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=f"{options.out}/{arm}-seed{seed}",
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_steps=options.passes * PASS * of_trainer.get("num_iterations", 1),
        per_device_train_batch_size=SIZE,
        num_generations=SIZE,
        max_completion_length=7,
        gradient_checkpointing=False,
        seed=seed,
        use_cpu=not cuda,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **of_trainer,
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=is_product,
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": f"15 = 3 * 5\n14 = 2 * 7\n{number} =", "number": number} for number in NUMBERS]
        ),
    )
    trainer.remove_callback(PrinterCallback)
    attach(trainer, **of_replay)
    trainer.train()
    right = [entry["reward"] for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    return [100 * sum(right[start : start + PASS]) / PASS for start in range(0, len(right), PASS)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--learning-rates", type=float, nargs=2, default=[3e-6, 1e-5], help="of stock and the preset")
    parser.add_argument("--passes", type=int, default=8, help="over the list")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", default="out/products")
    options = parser.parse_args()
    if options.passes < 1:
        parser.error(f"--passes {options.passes}: train for 1 or more")
    print("% right, by pass over the list")
    for seed in options.seeds:
        for arm, learning_rate in zip(ARMS, options.learning_rates, strict=True):
            right = train(arm, learning_rate, seed, options)
            print(f"seed {seed} {arm:6}", *(f"{share:2.0f}" for share in right), flush=True)


if __name__ == "__main__":
    main()
