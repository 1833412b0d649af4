"""How far SmolLM2's log-probs move at equal weights, and what of its replayed rows a narrow clip range then takes.

python benchmarks/noise.py           # needs what examples/smollm2_reasoning.py names; six minutes of a core
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trl_replay

sys.path.append(str(Path(__file__).parents[1] / "examples"))
PROMPTS = (
    "The capital of France is", "Once upon a time", "def add(a, b):", "The weather today", "Water is",
    "My favorite book", "To cook rice,", "In 1969, people",
)  # fmt: skip
TOKENS = 64


def coin(completions: list[str], **_: Any) -> list[float]:
    """A reward that has live groups."""
    return [float(random.Random(text).random() < 0.5) for text in completions]


def make_trainer(folder: Path, bf16: bool, updates: int) -> Any:
    from smollm2_reasoning import smollm2

    model, tokenizer = smollm2(folder / "model")
    args = GRPOConfig(
        output_dir=str(folder / "run"), bf16=bf16, use_cpu=True, report_to="none", learning_rate=0.0,
        max_steps=updates, logging_steps=1, disable_tqdm=True, save_strategy="no", gradient_checkpointing=False,
        per_device_train_batch_size=16, num_generations=8, max_completion_length=TOKENS, loss_type="grpo",
        importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    return GRPOTrainer(model, coin, args=args, train_dataset=rows, processing_class=tokenizer)


@torch.no_grad()
def sampled_noise(trainer: Any) -> torch.Tensor:
    """`(prompts, TOKENS)`: of sampled tokens, alone and behind padding among others. No code of trl_replay's."""
    model, tokenizer = trainer.model.eval(), trainer.processing_class
    torch.manual_seed(0)

    def logps(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        spread = model(input_ids=ids, attention_mask=mask).logits.float()[:, -TOKENS - 1 : -1].log_softmax(dim=-1)
        return spread.gather(2, ids[:, -TOKENS:, None])[..., 0]

    with trainer.accelerator.autocast():
        rows = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            rows.append(model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, top_k=0)[0])
        width = max(map(len, rows)) + 5
        batch = torch.full((len(rows), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(batch)
        for number, row in enumerate(rows):
            batch[number, -len(row) :], mask[number, -len(row) :] = row, 1
        alone = torch.cat([logps(row[None], torch.ones_like(row[None])) for row in rows])
        return logps(batch, mask) - alone


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=8, help="of each run at learning rate 0")
    parser.add_argument("--out", type=Path, default=Path("out/noise"), help="where the converted model is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = (
        "", "`session.noise`: a token's mean, max", "seconds of attach", "sampled tokens: mean, max",
        "a completion's mean", "replayed rows clipped at learning rate 0: without, with the noise",
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for bf16 in (False, True):
        shares = []
        for knows in (False, True):
            trainer = make_trainer(options.out, bf16, options.updates)
            began = time.perf_counter()
            session = trl_replay.attach(
                trainer, replay_start=0, replay_selector="always(share=0.5)", replay_record="forward"
            )
            seconds, noise = time.perf_counter() - began, session.noise
            if not knows:
                session.components.loss.bounds.noise = None
            with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory():
                trainer.train()
            clipped = [log["replay/clip_ratio"] for log in trainer.state.log_history if "replay/clip_ratio" in log]
            shares.append(f"{sum(clipped) / len(clipped):.0%}")
        moved = sampled_noise(trainer)
        size, rows = moved.abs(), moved.mean(dim=1).abs()
        print(
            f"| {'bfloat16 autocast' if bf16 else 'single precision'} | {noise.token_mean:.2g}, {noise.token_max:.2g} "
            f"| {seconds:.1f} | {size.mean():.2g}, {size.max():.2g} | {rows.mean():.2g} | {', '.join(shares)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
