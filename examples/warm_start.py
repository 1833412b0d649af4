# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Fills the buffer with a teacher's completions before training: prompts, completions and rewards from a JSONL file.

    python examples/warm_start.py --out out/warm_start    # 20 seconds on a CPU

The reward is so sparse that stock GRPO hardly ever sees one; the teacher's groups show it from the start. Nothing is
downloaded: model, tokenizer and prompts are built in code.
"""

import argparse
import json
from pathlib import Path

import torch

import trl_replay
from trl_replay.testing import make_trainer

ANSWERS = {"1+1=": "2", "2+3=": "5", "4+4=": "8"}


def right_answer(prompts, completions, **kwargs):
    return [float(text == ANSWERS[prompt]) for prompt, text in zip(prompts, completions, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/warm_start"))
    out = parser.parse_args().out

    out.mkdir(parents=True, exist_ok=True)
    teacher = out / "teacher.jsonl"
    with teacher.open("w") as file:
        for prompt, answer in ANSWERS.items():
            for completion in (answer, "0", "9", "7"):
                reward = float(completion == answer)
                file.write(json.dumps({"prompt": prompt, "completion": completion, "reward": reward}) + "\n")

    torch.set_num_threads(1)
    stock = train(out / "stock", use_replay=False)
    # without the teacher's log-probs, ratios count from the untrained policy: topr does not clip right answers by them
    taught = train(out / "taught", replay_warm_start=str(teacher), replay_correction="topr")
    print("right answers in the last 10 updates:")
    print(f"{stock:.0%} with stock GRPO")
    print(f"{taught:.0%} with the teacher's groups")


def train(out, **replay):
    """Trains a new model; returns the share of right answers at the end."""
    trainer = make_trainer(out, right_answer, prompts=list(ANSWERS), max_steps=60, max_completion_length=2)
    trl_replay.attach(trainer, **replay)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return sum(rewards[-10:]) / 10


if __name__ == "__main__":
    main()
