# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Trains a second time on the completions of a first run: 100 updates that generate one batch in all.

    python examples/second_run.py --out out/second_run

The first run is stock GRPO on 21 sums, with `replay_dry_run=True` so that its groups are kept and exported. Each
second run begins with the same untrained model. Nothing is downloaded: model, tokenizer, and prompts are built in
code.
"""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

import trl_replay
from trl_replay.testing import make_trainer

ANSWERS = {f"{a}+{b}=": str(a + b) for a in range(2, 7) for b in range(2, 7) if a + b < 10}
ROWS = 64
"""Completions of a batch."""


def accuracy(prompts, completions, **kwargs):
    return [float(text[:1] == ANSWERS[prompt]) for prompt, text in zip(prompts, completions, strict=True)]


def trainer_with(out, updates, updates_of_a_batch):
    return make_trainer(
        out,
        accuracy,
        prompts=list(ANSWERS) * 8,
        eval_prompts=list(ANSWERS) * 8,
        max_steps=updates,
        num_iterations=updates_of_a_batch,
        num_generations=8,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_completion_length=2,
        learning_rate=2e-3,
    )


def trained(trainer):
    """The accuracy of sampled answers to all prompts, after training."""
    with redirect_stdout(StringIO()):
        trainer.train()
        return trainer.evaluate()["eval_reward"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/second_run"))
    parser.add_argument("--updates", type=int, default=100, help="of each run")
    options = parser.parse_args()
    out, updates = options.out, options.updates
    torch.set_num_threads(1)
    print(f"{'run':9} completions updates accuracy", flush=True)

    trainer = trainer_with(out, updates, updates_of_a_batch=1)
    groups = updates * ROWS // 8
    session = trl_replay.attach(trainer, replay_dry_run=True, replay_buffer_size=groups)
    first = trained(trainer)
    file = session.export(out / "first_run.parquet")
    print(f"{'stock':9} {updates * ROWS:11} {updates:7} {first:8.2f}", flush=True)

    for correction in ("topr", "imitation"):
        trainer = trainer_with(out, updates, updates_of_a_batch=updates)
        trl_replay.attach(
            trainer,
            replay_preset="second_run",
            replay_warm_start=str(file),
            replay_buffer_size=groups,
            replay_correction=correction,
        )
        second = trained(trainer)
        print(f"{correction:9} {ROWS:11} {updates:7} {second:8.2f}", flush=True)


if __name__ == "__main__":
    main()
