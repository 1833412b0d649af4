# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay", "unsloth"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Replay with Unsloth's GRPO trainer (experimental): a list of numbers to write as products, LoRA, one GPU.

    python examples/unsloth_replay.py

What differs from a script without replay is the line with `attach`, and `num_iterations=2` and `beta=0.1`, which its
preset needs. What was tested with which release, and what was not (fast kernels, 16 and 4 bits):
docs/compatibility.md.
"""

import argparse
import re

import unsloth  # before trl and transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trl_replay

NUMBERS = [12, 16, 18, 20, 24, 28, 30, 32, 36, 40, 42, 45, 48, 54, 56, 60, 63, 64, 66, 70, 72, 80, 84, 90]


def is_product(completions, number, **_):
    """1 if the first line is `a * b`, with factors above 1 whose product is the number; else 0."""
    rewards = []
    for text, product in zip(completions, number, strict=True):
        factors = re.match(r"\s*(\d{1,3}) *\* *(\d{1,3})\s*?\.?\s*?(\n|$)", text)
        a, b = map(int, factors.group(1, 2)) if factors else (1, 1)
        rewards.append(float(min(a, b) > 1 and a * b == product))
    return rewards


def train(model, tokenizer, args):
    """Eight passes over the list, stored groups included."""
    rows = [{"prompt": f"15 = 3 * 5\n14 = 2 * 7\n{number} =", "number": number} for number in NUMBERS]
    trainer = GRPOTrainer(model, is_product, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    session = trl_replay.attach(trainer, replay_preset="sample_efficient")
    trainer.train()
    return session


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="unsloth/Qwen2.5-0.5B")
    parser.add_argument("--output_dir", default="out/unsloth_replay")
    options = parser.parse_args()
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        options.model, max_seq_length=256, load_in_4bit=False, fast_inference=False
    )
    model = unsloth.FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
    args = GRPOConfig(
        output_dir=options.output_dir,
        num_iterations=2,
        beta=0.1,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=2 * 8 * len(NUMBERS),
        per_device_train_batch_size=16,
        num_generations=16,
        max_completion_length=7,
        logging_steps=1,
        report_to="none",
    )
    print(train(model, tokenizer, args).explain())


if __name__ == "__main__":
    main()
