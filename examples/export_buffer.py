# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""Trains a tiny model with replay, exports the buffer to Parquet, and reads it back with `datasets`.

    python examples/export_buffer.py --out out/export

Nothing is downloaded: model, tokenizer and prompts are built in code.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset

import trl_replay
from trl_replay.testing import make_trainer


def starts_with_a_digit(completions, **kwargs):
    return [float(text[:1].isdigit()) for text in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/export"))
    out = parser.parse_args().out

    torch.set_num_threads(1)
    trainer = make_trainer(out, starts_with_a_digit, max_steps=10)
    session = trl_replay.attach(trainer)
    trainer.train()

    path = session.export(out / "buffer.parquet")
    rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(out / "cache"))
    print(f"{path}: {len(rows)} completions of {len(session.buffer)} groups")
    best = max(rows, key=lambda row: row["advantage"])
    print(f"the highest advantage, {best['advantage']:.2f}: {best['prompt']!r} → {best['completion']!r}")


if __name__ == "__main__":
    main()
