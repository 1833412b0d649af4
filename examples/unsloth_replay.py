# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay", "unsloth"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Replay with Unsloth's GRPO trainer (experimental): sums, LoRA, one GPU.

    python examples/unsloth_replay.py

What differs from a script without replay is the line with `attach`. What was tested with which release, and what was
not (fast kernels, 16 and 4 bits): docs/compatibility.md.
"""

import argparse
import random
import re

import unsloth  # before trl and transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trl_replay


def sums(count):
    numbers = random.Random(0)
    pairs = [(numbers.randrange(1000), numbers.randrange(10 ** numbers.randrange(1, 5))) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs])


def is_right(completions, answer, **columns):
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers[:1] == [right]) for numbers, right in zip(found, answer, strict=True)]


def train(model, tokenizer, output_dir, **settings):
    args = GRPOConfig(
        output_dir=output_dir,
        **{
            "num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 16,
            "learning_rate": 1e-5, "max_steps": 200, "logging_steps": 1, "report_to": "none", **settings,
        },
    )  # fmt: skip
    trainer = GRPOTrainer(model, is_right, args, train_dataset=sums(2000), processing_class=tokenizer)
    session = trl_replay.attach(trainer, replay_buffer_size=64)
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
    train(model, tokenizer, options.output_dir)


if __name__ == "__main__":
    main()
