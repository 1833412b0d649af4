"""The efficiency benchmark's tables and picture, from its records, for docs/evidence-defaults.md.

python benchmarks/efficiency_report.py benchmarks/results    # draws the picture anew, prints the tables as Markdown
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import efficiency


def table(records: list[dict[str, Any]], arms: Iterable[str]) -> list[str]:
    """A row an arm, a column a task, as Markdown: completions to 0.25 (seeds that got there), and the final reward."""
    seen = {record["task"] for record in records}
    tasks = [task for task in efficiency.TASKS if task in seen]
    rows = [f"| | {' | '.join(tasks)} | collapsed |", f"|{'---|' * (len(tasks) + 2)}"]
    for arm in arms:
        of_arm = [record for record in records if record["arm"] == arm]
        cells = [_cell([record for record in of_arm if record["task"] == task]) for task in tasks]
        collapsed = f"{sum(record['collapsed'] for record in of_arm)} of {len(of_arm)}"
        rows.append(f"| {' | '.join([arm, *cells, collapsed])} |")
    return rows


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
    reached = [run["reached"] for run in runs if run["reached"] is not None]
    ordered = sorted(run["reached"] or np.inf for run in runs)
    middle = ordered[len(ordered) // 2]
    return (
        f"{middle:,.0f} ({len(reached)} of {len(runs)})" if np.isfinite(middle) else f"{len(reached)} of {len(runs)}"
    )


def tables(records: list[dict[str, Any]]) -> list[list[str]]:
    """The tables of docs/evidence-defaults.md, of what a ledger holds."""
    reported = [record for record in records if record["seed"] in efficiency.SEEDS]
    parts = [
        record
        for record in reported
        if record["task"] in efficiency.PARTS and record["seed"] in efficiency.SEEDS_OF_PARTS
    ]
    return [table(reported, arms_of(reported, efficiency.ARMS)), table(parts, arms_of(parts, efficiency.LEFT_OUT))]


def arms_of(records: list[dict[str, Any]], arms: Iterable[str]) -> list[str]:
    """Those that were run."""
    run = {record["arm"] for record in records}
    return [arm for arm in arms if arm in run]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = [json.loads(line) for line in (folder / "efficiency.jsonl").read_text().splitlines()]
    print("\n\n".join("\n".join(table) for table in tables(found)))
