"""The efficiency benchmark's tables and picture, from its records, for benchmarks/reports/efficiency.md
and benchmarks/reports/preset.md.

python benchmarks/efficiency_report.py    # draws the picture anew, prints the tables as Markdown
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import efficiency
import numpy as np
from completions import picture
from toys import BATCHES_A_POINT, COMPLETIONS_A_BATCH

RESULTS = Path(__file__).parent / "results"
LEARNED = 0.05
"""A run whose reward was never that high has nothing to lose, and can't collapse."""
DRAWN = ("stock", "defaults", "topr, start=0", "sample_efficient")
"""Arms of the picture."""
NAMES = {"stock": "stock GRPO", "defaults": "replay"}


def table(records: list[dict[str, Any]], arms: Iterable[str]) -> list[str]:
    """A row an arm, a column a task, as Markdown: completions to 0.25 (seeds that got there), and the final reward."""
    seen = {record["task"] for record in records}
    tasks = [task for task in efficiency.TASKS if task in seen]
    rows = [f"| | {' | '.join(tasks)} | collapsed |", f"|{'---|' * (len(tasks) + 2)}"]
    for arm in arms:
        of_arm = [record for record in records if record["arm"] == arm]
        cells = [_cell([record for record in of_arm if record["task"] == task]) for task in tasks]
        fallen = [collapsed(record) for record in of_arm]
        rows.append(f"| {' | '.join([arm, *cells, f'{sum(fallen)} of {len(fallen)}'])} |")
    return rows


def collapsed(run: dict[str, Any]) -> bool:
    """Tells whether a run learned, and ended below half of its best mean over 25 batches."""
    batches = run["updates"] // run["training"].get("num_iterations", 1)
    best = max(run["curve"][: batches // BATCHES_A_POINT], default=0.0)  # without what is left over, a batch or two
    return bool(best >= LEARNED and run["final_reward"] < best / 2)


def _cell(runs: list[dict[str, Any]]) -> str:
    """Medians over the seeds, and the range of the final rewards; addition is told by its accuracy, too."""
    if not runs:
        return ""
    finals = [run["final_reward"] for run in runs]
    parts = [f"{np.median(finals):.2f} ({min(finals):.2f}–{max(finals):.2f})"]
    if any(run["reached"] is not None for run in runs):
        parts.insert(0, _reached(runs))
    if "accuracy" in runs[0]:
        parts.append(f"accuracy {np.median([run['accuracy'] for run in runs]):.3f}")
    return "; ".join(parts)


def _reached(runs: list[dict[str, Any]]) -> str:
    """The median, a run that did not counting as later than all; and how many did."""
    count = sum(run["reached"] is not None for run in runs)
    middle = sorted(run["reached"] or np.inf for run in runs)[len(runs) // 2]
    return f"{middle:,.0f} ({count} of {len(runs)})" if np.isfinite(middle) else f"{count} of {len(runs)}"


def tables(records: list[dict[str, Any]]) -> list[list[str]]:
    """The tables of both pages, of what a ledger holds."""
    reported = [record for record in records if record["seed"] in efficiency.SEEDS]
    sums = [record for record in reported if record["task"] == "sum"]
    reported = [record for record in reported if record["task"] != "sum"]
    parts = [record for record in reported if record["seed"] in efficiency.SEEDS_OF_PARTS]
    parts = [record for record in parts if record["task"] in efficiency.PARTS]
    return [
        table(reported, arms_of(reported, efficiency.ARMS)),
        table(parts, arms_of(parts, efficiency.LEFT_OUT)),
        table(sums, efficiency.SUMS),
    ]


def arms_of(records: list[dict[str, Any]], arms: Iterable[str]) -> list[str]:
    """Those that were run."""
    run = {record["arm"] for record in records}
    return [arm for arm in arms if arm in run]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Mean reward over completions: what learns on which task, and the preset without one of its parts. An arm's runs
    thin, their median thick."""
    pictures = [(task, DRAWN) for task in ("lock", "vault", "grades")]
    pictures += [(task, tuple(efficiency.LEFT_OUT)) for task in efficiency.PARTS]
    with picture(path, len(pictures), figsize=(7, 5 * len(pictures)), dpi=80) as (_, axes):
        for axis, (task, arms) in zip(axes, pictures, strict=True):
            _draw_task(axis, [record for record in records if record["task"] == task], arms)
            parts = "" if arms is DRAWN else ": the preset without one of its parts"
            axis.set(title=f"{task}{parts}", xlabel="completions generated", ylabel="mean reward", ylim=(0, 1))


def _draw_task(axis: Any, records: list[dict[str, Any]], arms: Iterable[str]) -> None:
    completions_a_point = BATCHES_A_POINT * COMPLETIONS_A_BATCH
    for number, arm in enumerate(arms):
        runs = [record for record in records if record["arm"] == arm and record["seed"] in efficiency.SEEDS]
        if not runs:
            continue
        points = min(run["rollouts"] for run in runs) // completions_a_point
        curves = np.array([run["curve"][:points] for run in runs])
        completions = np.arange(1, points + 1) * completions_a_point
        axis.plot(completions, curves.T, color=f"C{number}", alpha=0.2, linewidth=0.8)
        axis.plot(completions, np.median(curves, axis=0), color=f"C{number}", linewidth=2, label=NAMES.get(arm, arm))
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, fontsize=12)


if __name__ == "__main__":
    found = [json.loads(line) for line in (RESULTS / "efficiency.jsonl").read_text().splitlines()]
    draw(found, RESULTS / "efficiency.png")
    print("\n\n".join("\n".join(table) for table in tables(found)))
