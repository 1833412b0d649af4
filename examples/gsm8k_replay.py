# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-replay"]
#
# [tool.uv.sources]
# trl-replay = { path = ".." }  # a clone: there is no release yet
# ///
"""GSM8K on one GPU: how many completions does stock GRPO's final accuracy take, with stock and with replay?

    pip install vllm                                               # which generates; --no-vllm goes without
    python examples/gsm8k_replay.py --table                        # what there is
    python examples/gsm8k_replay.py                                # every run that is missing, one after the other
    python examples/gsm8k_replay.py --arms preset --seeds 0        # one run
    python examples/gsm8k_replay.py --model Qwen/Qwen2.5-3B-Instruct --ledger gsm8k_3b.jsonl

benchmarks/plans/gsm8k.md says which arms, learning rates, and seeds. Runs append to the ledger, a line a
measurement; one that is whole is not repeated. `--data` is a folder with `train.jsonl` and `test.jsonl`
(columns `question` and `answer`, as in GSM8K), or a data set on the hub.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset, load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import trl_replay
from trl_replay.extras.outcome.run import Curve

SYSTEM = "Solve the problem step by step. End with a line `#### ` and the answer as a plain number."
PILOT = 100
"""The seed that chooses learning rates, and is not reported."""


@dataclass(frozen=True)
class Arm:
    """A way to train: `updates` of each generation batch, and replay's settings, if any."""

    updates: int = 1
    beta: float = 0.0
    replay: str | None = None


ARMS = {"stock": Arm(), "stock, 2 updates": Arm(2), "preset": Arm(2, 0.1, "sample_efficient")}
RATES = (1e-6, 3e-6)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """One run; its lines in the ledger begin with this."""

    model: str
    arm: str
    rate: float
    seed: int


def number(text: str) -> str | None:
    """The last number of a text, without commas and a trailing zero part: `"1,200.00"` is `"1200"`."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not found:
        return None
    plain = found[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the number behind `####` is the answer's."""
    texts = [messages[-1]["content"] for messages in completions]
    right = [number(text.rpartition("####")[2]) if "####" in text else None for text in texts]
    return [float(found is not None and found == number(wanted)) for found, wanted in zip(right, answer, strict=True)]


def rows(data: str, split: str, count: int | None) -> Dataset:
    """Prompts as messages, and answers."""
    folder = Path(data)
    if folder.is_dir():
        dataset = load_dataset("json", data_files=str(folder / f"{split}.jsonl"), split="train")
    else:
        dataset = load_dataset(data, "main", split=split)
    dataset = dataset.select(range(min(count or len(dataset), len(dataset))))

    def as_prompt(row: dict[str, str]) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
        return {"prompt": messages, "answer": row["answer"].rpartition("####")[2].strip()}

    return dataset.map(as_prompt, remove_columns=dataset.column_names)


class Watch(TrainerCallback):
    """Appends a line to the ledger at each evaluation."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.began = time.perf_counter()
        self.dead: list[float] = []
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.origin = {"trl": trl.__version__, "trl_replay": trl_replay.__version__, "device": device}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Keep the share of dead groups."""
        if "frac_reward_zero_std" in logs:
            self.dead.append(logs["frac_reward_zero_std"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Write the accuracy."""
        if not state.is_world_process_zero:
            return
        batch = state.global_step // ARMS[self.run.arm].updates
        line = {
            **asdict(self.run),
            **self.origin,
            "batch": batch,
            "completions": batch * self.options.prompts * self.options.group,
            "accuracy": metrics["eval_reward"],
            "dead": round(sum(self.dead) / len(self.dead), 4) if self.dead else None,
            "seconds": round(time.perf_counter() - self.began),
        }
        self.dead.clear()
        with self.options.ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")


def perform(run: Run, options: argparse.Namespace) -> None:
    """Trains one run."""
    arm = ARMS[run.arm]
    batch = options.prompts * options.group
    args = GRPOConfig(
        output_dir=str(options.out / f"{run.arm} {run.rate} {run.seed}"),
        seed=run.seed,
        max_steps=options.batches * arm.updates,
        num_iterations=arm.updates,
        beta=arm.beta,
        learning_rate=run.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5 * arm.updates,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=batch // options.rows,
        num_generations=options.group,
        max_completion_length=options.tokens,
        eval_strategy="steps",
        eval_steps=options.every * arm.updates,
        eval_on_start=True,
        per_device_eval_batch_size=options.rows,
        num_generations_eval=1,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.35,
        bf16=options.vllm,
        use_cpu=not options.vllm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=run.model,
        reward_funcs=accuracy,
        args=args,
        train_dataset=rows(options.data, "train", options.list),
        eval_dataset=rows(options.data, "test", options.questions),
    )
    trainer.add_callback(Watch(run, options))
    trl_replay.attach(trainer, use_replay=arm.replay is not None, replay_preset=arm.replay)
    trainer.train()


def curves(options: argparse.Namespace) -> dict[Run, Curve]:
    """The whole runs of the ledger; of one that began anew the last lines."""
    lines: dict[Run, list[dict[str, Any]]] = {}
    text = options.ledger.read_text() if options.ledger.exists() else ""
    for line in map(json.loads, text.splitlines()):
        run = Run(line["model"], line["arm"], line["rate"], line["seed"])
        lines[run] = [*(lines.get(run, []) if line["batch"] else []), line]
    return {
        run: Curve([line["completions"] for line in own], [line["accuracy"] for line in own])
        for run, own in lines.items()
        if run.model == options.model and own[-1]["batch"] >= options.batches
    }


def rate(arm: str, done: dict[Run, Curve]) -> float | None:
    """The learning rate with the highest accuracy at the end of the pilots; None before there are all of them."""
    pilots = {run.rate: curve.end for run, curve in done.items() if (run.arm, run.seed) == (arm, PILOT)}
    return max(RATES, key=lambda each: pilots[each]) if pilots.keys() >= set(RATES) else None


def missing(options: argparse.Namespace) -> Iterator[Run]:
    """The pilots first, then seed by seed."""
    for each in RATES:
        yield from (Run(options.model, arm, each, PILOT) for arm in options.arms)
    for seed in options.seeds:
        for arm in options.arms:
            if (best := rate(arm, curves(options))) is not None:
                yield Run(options.model, arm, best, seed)


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--data", default="openai/gsm8k", help="a data set on the hub, or a folder of JSON lines")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--list", type=int, default=960, help="training questions, which come again: 5 times each")
    parser.add_argument("--batches", type=int, default=150, help="generation batches of a run")
    parser.add_argument("--every", type=int, default=10, help="batches from a measurement to the next")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a batch")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--rows", type=int, default=16, help="completions of a micro-batch")
    parser.add_argument("--tokens", type=int, default=320, help="tokens of a completion, at most")
    parser.add_argument("--questions", type=int, default=400, help="test questions of a measurement")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="generate with transformers, on a CPU")
    parser.add_argument("--ledger", type=Path, default=Path("gsm8k.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("out/gsm8k"))
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args()
    if not options.table:
        for run in missing(options):
            if run not in curves(options):
                perform(run, options)
    done = curves(options)
    chosen = {
        (run.arm, run.seed): curve
        for run, curve in done.items()
        if run.seed != PILOT and run.rate == rate(run.arm, done)
    }
    print("| | seed | completions to stock's end | stock itself | end | stock's end |\n|---|---|---|---|---|---|")
    for (arm, seed), curve in chosen.items():
        if arm != "stock" and (stock := chosen.get(("stock", seed))):
            own, taken = stock.first(stock.end), curve.first(stock.end)
            print(f"| {arm} | {seed} | {taken:,.0f} | {own:,.0f} | {curve.end:.2f} | {stock.end:.2f} |")


if __name__ == "__main__":
    main()
