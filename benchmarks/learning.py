"""Does replay learn more from the same number of completions, and does it do no harm where stock learns well?

    python benchmarks/learning.py            # all of it: about 45 minutes on one core; writes learning.json in --out
    python benchmarks/learning.py --table    # prints the table of benchmarks/results, and draws its picture anew

Tasks: the combination lock (sparse) and 3-digit addition from a half-trained model (dense control). Arms: stock,
corrected (the defaults of ReplayConfig), uncorrected (replay_correction="none"), with the same settings on both tasks.
For each arm and task one learning rate is chosen from the task's grid by final reward, averaged over seeds that are
not reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import completions
import numpy as np
from toys import Benchmark, Record, Settings, Task, parser_of

RESULTS = Path(__file__).parent / "results"
TASKS = {
    "lock": Task(1499 * 64, (2e-4, 3e-4, 5e-4, 1e-3), (100, 101)),
    "addition": Task(499 * 64, (1e-5, 3e-5, 1e-4), (100, 101)),
}
"""A run makes one batch more: 96,000 and 32,000 completions."""
ARMS: dict[str, Settings] = {"stock": None, "corrected": {}, "uncorrected": {"replay_correction": "none"}}
SEEDS = (0, 1, 2, 3, 4)
NAMES = {"stock": "stock GRPO", "corrected": "replay", "uncorrected": "replay, uncorrected"}
COLORS = {"stock": "#666666", "corrected": "#0b6bcb", "uncorrected": "#c44601"}


def of_arm(results: dict[str, Any], task: str, arm: str) -> list[Record]:
    """The reported runs."""
    return [run for run in results["tasks"][task]["runs"] if run["arm"] == arm]


def draw(results: dict[str, Any], path: Path) -> None:
    """Rewards on the lock: each seed thin, an arm's median thick."""
    with completions.picture(path, figsize=(7, 5), dpi=110) as (figure, axis):
        for arm, color in COLORS.items():
            runs = of_arm(results, "lock", arm)
            curves = np.array([run["curve"] for run in runs])
            thousands = runs[0]["rollouts"] / 1000 * np.arange(1, curves.shape[1] + 1) / curves.shape[1]
            axis.plot(thousands, curves.T, color=color, alpha=0.5, linewidth=0.8)
            axis.plot(thousands, np.median(curves, axis=0), color=color, linewidth=2.5, label=NAMES[arm])
        axis.set(title="combination lock: 5 seeds and their median", ylim=(0, 1.01), xlim=(0, None))
        axis.set(xlabel="thousand completions generated", ylabel="mean reward")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)


def overview(results: dict[str, Any]) -> list[str]:
    """The rows of the table in benchmarks/reports/learning.md, as Markdown."""
    rows = []
    for arm, name in NAMES.items():
        lock, addition = (of_arm(results, task, arm) for task in TASKS)
        bold = "**{}**" if arm == "corrected" else "{}"
        there = sum(run["reached"] is not None for run in lock)
        median = np.median([run["reached"] or run["rollouts"] for run in lock])
        ends = [run["final_reward"] for run in lock]
        dead = [np.mean([100 * run[share] for run in lock]) for share in ("dead", "dead_after")]
        told = f"{there} of {len(lock)}" + (" runs got there" if arm == "stock" else "")
        accuracy = f"{np.mean([run['accuracy'] for run in addition]):.3f}"
        cells = [
            bold.format(name) if arm == "corrected" else name,
            f"{bold.format(f'{median:,.0f}')} ({told})",
            f"{bold.format(f'{np.median(ends):.2f}')} ({min(ends):.2f}–{max(ends):.2f})",
            f"{dead[0]:.0f} % → {dead[1]:.0f} %",
            accuracy if arm == "stock" else f"{accuracy}, {bold.format(gain(results, arm))}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def gain(results: dict[str, Any], arm: str = "corrected") -> str:
    """In accuracy on addition, paired with stock: the mean, and its standard error."""
    accuracies = [{run["seed"]: run["accuracy"] for run in of_arm(results, "addition", one)} for one in (arm, "stock")]
    return completions.paired(*accuracies)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = parser_of(__doc__, "learning")
    parser.add_argument("--table", action="store_true", help="only print what there is, and draw it")
    options = parser.parse_args(arguments)
    if options.table:
        results = json.loads((RESULTS / "learning.json").read_text())
        draw(results, RESULTS / "learning.png")
    else:
        benchmark = Benchmark(TASKS, SEEDS, lambda arm, *_: (ARMS[arm], {}), options)
        tasks = {task: {"runs": benchmark.at_chosen_rates(ARMS, tasks=[task])} for task in TASKS}
        results = {"quick": options.quick, "tasks": tasks}
        for task, found in tasks.items():
            found["chosen"] = {arm: benchmark.choose(task, arm) for arm in ARMS}
        (options.out / "learning.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(overview(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
