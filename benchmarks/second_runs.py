"""How well does a second run learn from a first run's completions, generating one batch in all?

Tasks, model, and measures are those of when_it_pays.py, as is what must be installed. A first run is stock at the rate
of its pilots, whose groups are exported; each second run begins with the model as it was before it, and makes as many
updates. The plan is in benchmarks/reports/second_runs.md.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import when_it_pays as study
from completions import mean_and_error
from runs import RESULTS, Done, Run, Study, ledger
from when_it_pays import Arm

SEEDS = (0, 1, 2)
LARGE = 4096
"""Groups: more than a first run has."""
TASKS = {"french": study.TASKS["french"], "products": study.TASKS["products"]}
FIRST = {"french": 4e-5, "products": 3e-6}
"""Stock's rates, of its pilots."""
RATES = {"french": (1e-5, 2e-5, 4e-5), "products": (3e-6, 1e-5, 3e-5)}
"""All from one file; the middle one is that of the arms that are run at one rate."""
ROW = 32
"""Rows of an update of supervised fine-tuning: as many as a batch of french has."""
SETTINGS = {"replay_preset": "second_run", "replay_buffer_size": LARGE}
ARMS: dict[str, dict[str, Any]] = {
    "topr": {},
    "topr, drawn by chance": {"replay_sampler": "prompt_balanced"},
    "imitation": {"replay_correction": "imitation"},
    "ratio": {"replay_correction": "ratio"},
    "topr, texts alone": {},
}
TEXTS = ("prompt", "completion", "reward/reward", "answer")
"""The columns of a file without token ids and log-probs."""
SUPERVISED = "SFTTrainer on the successes"
ONLINE = "stock, generating again"


def file_of(task: str, seed: int, out: Path) -> Path:
    """What a first run exported."""
    return out / f"{task} {seed}.parquet"


def queue(done: Done) -> Iterator[Run]:
    """Seed by seed, task by task, a first run, and once its file is there the arms at one rate before other rates."""
    for seed, (task, (low, middle, high)) in itertools.product(SEEDS, RATES.items()):
        first = Run(task, "first run", FIRST[task], seed)
        yield first
        if first in done:
            yield from (Run(task, arm, middle, seed) for arm in (*ARMS, SUPERVISED))
            yield from (Run(task, arm, rate, seed) for arm in ("topr", SUPERVISED) for rate in (low, high))


STUDY = Study("second_run", lambda run, line: "is_over" in line, queue)


def train_first(run: Run, path: Path) -> None:
    """Stock, whose groups are kept and exported."""
    task = TASKS[run.task]
    arm = Arm({"replay_dry_run": True, "replay_buffer_size": LARGE})
    study.perform(run, task, arm, path, lambda session: session.export(file_of(run.task, run.seed, path.parent)))


def train_second(run: Run, path: Path) -> None:
    """One generated batch, and as many updates as the first run made."""
    whole = TASKS[run.task]
    file = file_of(run.task, run.seed, path.parent)
    if run.arm.endswith("texts alone"):
        import pandas

        file = file.with_suffix(".jsonl")
        pandas.read_parquet(file.with_suffix(".parquet"))[list(TEXTS)].to_json(file, orient="records", lines=True)
    settings = {**SETTINGS, **ARMS[run.arm], "replay_warm_start": str(file)}
    once = replace(whole, batches=1, every=1, accuracy_every=1)
    study.perform(run, once, Arm(settings, iterations=whole.batches), path)


def train_supervised(run: Run, path: Path) -> None:
    """TRL's SFTTrainer on the rows of the file that succeeded, as many updates."""
    import pandas
    from datasets import Dataset
    from smollm2_reasoning import smollm2
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    task = TASKS[run.task]
    _, tokenizer = smollm2(path.parent / "model")
    model = AutoModelForCausalLM.from_pretrained(path.parent / "model", attn_implementation=study.ATTENTION)
    rows = pandas.read_parquet(file_of(run.task, run.seed, path.parent))
    right = rows[rows["reward/reward"] == 1][["prompt", "completion"]]
    args = SFTConfig(
        output_dir=str(path.parent / "trainer"),
        seed=run.seed,
        max_steps=task.batches,
        learning_rate=run.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=ROW,
        completion_only_loss=True,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=study.DEVICE == "cpu",
        bf16=True,
        gradient_checkpointing=False,
    )
    dataset = Dataset.from_pandas(right, preserve_index=False)
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    line = {**vars(run), "batch": 0, **study.measured(trainer.model, tokenizer, task)}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def perform(run: Run, path: Path) -> None:
    """Trains a run, and says that it is over."""
    if run.arm == "first run":
        train_first(run, path)
    elif run.arm == SUPERVISED:
        train_supervised(run, path)
    else:
        train_second(run, path)
    last = ledger(path)[run][-1]
    with path.open("a") as file:
        file.write(json.dumps({**last, "is_over": True}) + "\n")


def last_lines(done: Done) -> dict[Run, dict[str, Any]]:
    """And those of stock's runs at the other rates, which generate again; they are in another ledger."""
    again = {
        replace(run, arm=ONLINE): lines
        for run, lines in ledger(RESULTS / "updates_per_batch.jsonl").items()
        if run.arm == "stock" and run.rate in set(RATES[run.task]) - {FIRST[run.task]} and run.seed in SEEDS
    }
    return {run: lines[-1] for run, lines in {**done, **again}.items()}


def table(whole: Done) -> list[str]:
    """A row a task, arm, and rate, as Markdown: sampled accuracy at the end, and minus the first run's."""
    rows = ["| task | run | rate | seeds | completions | sampled accuracy | minus the first run's | pass@8 |"]
    rows.append("|" + "---|" * 8)
    done = last_lines(whole)
    keys = dict.fromkeys((run.task, run.arm, run.rate) for run in (*queue(whole), *done))
    for task, arm, rate in keys:
        found = {run.seed: last for run, last in done.items() if (run.task, run.arm, run.rate) == (task, arm, rate)}
        first = {run.seed: last["sampled"] for run, last in done.items() if (run.task, run.arm) == (task, "first run")}
        if not found:
            continue
        gains = [last["sampled"] - first[seed] for seed, last in found.items() if seed in first]
        is_first, is_supervised = arm in ("first run", ONLINE), arm == SUPERVISED
        generated = TASKS[task].rollouts if is_first else 0 if is_supervised else TASKS[task].groups * TASKS[task].size
        cells = [task, arm, f"{rate:g}", str(len(found)), f"{generated:,}"]
        cells.append(f"{np.mean([last['sampled'] for last in found.values()]):.2f}")
        cells.append("–" if arm == "first run" or not gains else mean_and_error(gains))
        cells.append(f"{np.mean([last['pass_at_8'] for last in found.values()]):.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    return STUDY.main(__doc__, lambda done: [table(done)], perform, arguments)


if __name__ == "__main__":
    sys.exit(main())
