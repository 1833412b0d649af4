"""Effects of each setting on both learning tasks, one at a time from the defaults, for docs/evidence-defaults.md.

    python benchmarks/choosing.py                    # about an hour on one core
    python benchmarks/choosing.py --arms defaults,heap --seeds 100

A coarse grid: one learning rate a task and few seeds, which benchmarks/learning.py does not report. It tells what
fails and what is worth more seeds (learning.py --arm); differences of less than the spread between seeds mean nothing.
Runs are kept in runs.jsonl in --out, so that an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learning import PROTOCOLS, Job, Ledger, parse_arm

RATES = {"lock": 3e-4, "addition": 1e-4}
ARMS = [
    "stock",
    "defaults",
    "none=correction:none",
    "truncated=correction:truncated",
    "sequence_mask=correction:sequence_mask",
    "topr=correction:topr",
    "m2po=correction:m2po",
    "decoupled=correction:decoupled",
    "shaped=correction:shaped",
    "per=correction:per",
    "heap=evictor:heap,sampler:proportional",
    "fifo=evictor:fifo,sampler:uniform",
    "reservoir=evictor:reservoir,sampler:uniform",
    "start=start:0",
    "max_age=max_age:100",
    "max_uses=max_uses:8",
    "half=max_fraction:0.5",
    "quarter=max_fraction:0.25",
    "weight=weight:0.5",
    "max_weight=max_weight:2.0",
    "retire=retire_passes:8",
    "size_16=buffer_size:16",
    "size_256=buffer_size:256",
    "always=selector:always",
    "exclude=unfilled:exclude",
    "intra_batch=unfilled:intra_batch",
]


def main() -> int:
    """Runs what is missing and prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/choosing"))
    parser.add_argument("--arms", default="", help="names from the list in this file; all if none")
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--tasks", default="lock,addition")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    named = {text.partition("=")[0]: text for text in ARMS}
    chosen = options.arms.split(",") if options.arms else list(named)
    settings = {name: None if name == "stock" else parse_arm(named[name])[1] for name in chosen}
    seeds, tasks = list(map(int, options.seeds.split(","))), options.tasks.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.out / "runs.jsonl")
    jobs = [
        Job(task, name, RATES[task], seed, PROTOCOLS[task].steps, PROTOCOLS[task].final, settings[name])
        for task in tasks
        for name in chosen
        for seed in seeds
    ]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in ledger.run(jobs, options.jobs):
        runs.setdefault((record["task"], record["arm"]), []).append(record)
    print("| from the defaults | lock: rollouts to 0.25 | lock: final reward | addition: accuracy | replaced there |")
    print("|---|---|---|---|---|")
    for name in chosen:
        lock, addition = runs.get(("lock", name), []), runs.get(("addition", name), [])
        reached = ", ".join(f"{r['reached']:,}" if r["reached"] else "–" for r in lock)
        final = ", ".join(f"{r['final_reward']:.2f}" for r in lock)
        accuracy = ", ".join(f"{r['accuracy']:.3f}" for r in addition)
        replaced = ", ".join(f"{r['replay'].get('replay/replaced_fraction', 0.0):.0%}" for r in addition)
        print(f"| {words(named[name])} | {reached} | {final} | {accuracy} | {replaced} |")
    (options.out / "choosing.json").write_text(
        json.dumps(
            [{key: run[key] for key in run if key != "explanation"} for group in runs.values() for run in group]
        )
    )
    return 0


def words(arm: str) -> str:
    """An arm as its settings."""
    name, _, rest = arm.partition("=")
    if not rest:
        return {"stock": "stock GRPO", "defaults": "**the defaults**"}[name]
    return " ".join(f"`{part.replace(':', '=', 1)}`" for part in rest.split(","))


if __name__ == "__main__":
    sys.exit(main())
