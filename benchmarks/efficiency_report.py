"""The efficiency benchmark's tables and picture, from its records, for benchmarks/reports/efficiency.md
and benchmarks/reports/preset.md.

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

SPARSE = ("lock", "wide lock", "vault", "long")
LEARNED = 0.05
"""A run whose reward was never that high has nothing to lose, and can't collapse."""
DRAWN = ("stock", "defaults", "topr, start=0", "sample_efficient")
"""Arms of the picture, and of the table of costs."""
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
    best = max(run["curve"][: batches // 25], default=0.0)  # without what is left over, a batch or two
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


def _reached(runs: list[dict[str, Any]], name: str = "reached") -> str:
    """The median, a run that did not counting as later than all; and how many did."""
    count = sum(run[name] is not None for run in runs)
    middle = _median(runs, name)
    return f"{count} of {len(runs)}" if middle is None else f"{middle:,.0f} ({count} of {len(runs)})"


def _median(runs: list[dict[str, Any]], name: str) -> float | None:
    """The median, a run that did not get there counting as later than all; None if it is such a run."""
    ordered = sorted(run[name] or np.inf for run in runs)
    middle = float(ordered[len(ordered) // 2])
    return middle if np.isfinite(middle) else None


def costs(records: list[dict[str, Any]], arms: Iterable[str]) -> list[str]:
    """A row an arm and a sparse task that a run learned, as Markdown: completions and updates to 0.25 and 0.75,
    seconds, and the crossover: with more updates' time for generating a batch, the arm is cheaper than the defaults up
    to 0.25."""
    rows = [
        "| task | arm | completions to 0.25 | to 0.75 | updates to 0.25 | seconds a run | cheaper if a batch takes |",
        f"|{'---|' * 7}",
    ]
    for task in SPARSE:
        of_task = [record for record in records if record["task"] == task]
        if not any(record["reached"] for record in of_task):
            continue
        usual = [record for record in of_task if record["arm"] == "defaults"]
        for arm in arms:
            runs = [record for record in of_task if record["arm"] == arm]
            if runs:
                rows.append(f"| {' | '.join([task, arm, *_costs(runs, usual)])} |")
    return rows


def _costs(runs: list[dict[str, Any]], usual: list[dict[str, Any]]) -> list[str]:
    updates = _updates(runs)
    return [
        _reached(runs),
        _reached(runs, "reached_three_quarters"),
        "–" if updates is None else f"{updates:,.0f}",
        f"{min(run['seconds'] for run in runs):.0f}",
        _crossover(runs, usual),
    ]


def _updates(runs: list[dict[str, Any]]) -> float | None:
    """To 0.25, in the median."""
    reached = _median(runs, "reached")
    if reached is None:
        return None
    iterations = runs[0]["training"].get("num_iterations", 1)
    return reached / efficiency.papers.COMPLETIONS_A_BATCH * iterations


def _crossover(runs: list[dict[str, Any]], usual: list[dict[str, Any]]) -> str:
    """The time of generating a batch, in updates, from which on the arm is cheaper than the usual one."""
    ours, theirs = _updates(runs), _updates(usual)
    if ours is None or theirs is None or runs == usual:
        return "–"
    fewer = (_median(usual, "reached") - _median(runs, "reached")) / efficiency.papers.COMPLETIONS_A_BATCH
    more = ours - theirs
    if fewer <= 0:
        return "never" if more >= 0 else f"under {more / fewer:.1f} updates"
    return "always" if more <= 0 else f"over {more / fewer:.1f} updates"


def tables(records: list[dict[str, Any]]) -> list[list[str]]:
    """The tables of both pages, of what a ledger holds."""
    reported = [record for record in records if record["seed"] in efficiency.SEEDS]
    sums = [record for record in reported if record["task"] == "sum"]
    reported = [record for record in reported if record["task"] != "sum"]
    parts = [record for record in reported if record["seed"] in efficiency.SEEDS_OF_PARTS]
    parts = [record for record in parts if record["task"] in efficiency.PARTS]
    return [
        table(reported, arms_of(reported, efficiency.ARMS)),
        costs(reported, DRAWN),
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = [(task, DRAWN) for task in ("lock", "vault", "grades")]
    pictures += [(task, tuple(efficiency.LEFT_OUT)) for task in efficiency.PARTS]
    pyplot.rcParams["font.size"] = 14  # can be read on a phone
    figure, axes = pyplot.subplots(len(pictures), figsize=(7, 5 * len(pictures)), layout="constrained")
    for axis, (task, arms) in zip(axes, pictures, strict=True):
        _draw_task(axis, [record for record in records if record["task"] == task], arms)
        parts = "" if arms is DRAWN else ": the preset without one of its parts"
        axis.set(title=f"{task}{parts}", xlabel="completions generated", ylabel="mean reward", ylim=(0, 1))
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _draw_task(axis: Any, records: list[dict[str, Any]], arms: Iterable[str]) -> None:
    batches_a_point = 25
    completions_a_point = batches_a_point * efficiency.papers.COMPLETIONS_A_BATCH
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
    folder = Path(sys.argv[1])
    found = [json.loads(line) for line in (folder / "efficiency.jsonl").read_text().splitlines()]
    draw(found, folder / "efficiency.png")
    print("\n\n".join("\n".join(table) for table in tables(found)))
