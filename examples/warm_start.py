# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Fills the buffer with a teacher's completions before training: prompts, completions and rewards from a JSONL file.

    python examples/warm_start.py --out out/warm_start

The reward is so sparse that the model alone would hardly ever see one; the teacher's groups show it from the start.
Nothing is downloaded: model, tokenizer and prompts are built in code.
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
    trainer = make_trainer(out, right_answer, prompts=list(ANSWERS), max_steps=30, max_completion_length=2)
    session = trl_replay.attach(trainer, replay_warm_start=str(teacher), replay_correction="ratio")
    trainer.train()

    taught = int((session.buffer.table.origin > 0).sum())
    uses = int(session.buffer.table.uses[session.buffer.table.origin > 0].sum())
    print(f"{taught} of the teacher's groups are in the buffer, replayed {uses} times")


if __name__ == "__main__":
    main()
