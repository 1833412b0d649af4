"""The learning benchmark's JSON, table, and picture, from its runs' records.

python benchmarks/learning_report.py benchmarks/results    # draws the picture anew, prints the table as Markdown
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

COLORS = {"stock": "#666666", "corrected": "#0b6bcb", "uncorrected": "#c44601"}
NAMES = {"stock": "stock GRPO", "corrected": "replay", "uncorrected": "replay, uncorrected"}
PICTURE = "learning.png"


def summarize(tasks: dict[str, Any], arms: dict[str, Any], out: Path, quick: bool) -> None:
    """Writes learning.json and learning.png into `out`, and prints summaries."""
    results: dict[str, Any] = {
        "quick": quick,
        "versions": {name: version(name) for name in ("trl-replay", "trl", "torch", "transformers")},
        "python": platform.python_version(),
        "arms": arms,
        "tasks": {},
    }
    if quick:
        print("QUICK: a few steps only; the figures mean nothing.")
    for task, result in tasks.items():
        table = _addition(result) if task == "addition" else _lock(result)
        results["tasks"][task] = {**result, "summary": table}
        print(task, table)
    (out / "learning.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {out / 'learning.json'}")
    if "lock" in tasks:
        draw(results, out)


def _by_arm(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def _lock(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    table = {}
    for arm, runs in _by_arm(result).items():
        finals = [run["final_reward"] for run in runs]
        table[arm] = {
            "learning_rate": result["chosen"][arm],
            "reached_median": float(np.median([run["reached"] or run["rollouts"] for run in runs])),
            "reached_runs": sum(run["reached"] is not None for run in runs),
            "final_median": float(np.median(finals)),
            "final_range": [min(finals), max(finals)],
            **_common(runs),
        }
    return table


def _addition(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arms = _by_arm(result)
    table = {}
    for arm, runs in arms.items():
        accuracies = [run["accuracy"] for run in runs]
        table[arm] = {
            "learning_rate": result["chosen"][arm],
            "start_accuracy": runs[0]["start_accuracy"],
            "accuracy_mean": float(np.mean(accuracies)),
            **_common(runs),
        }
        if "stock" in arms and arm != "stock":
            stock = {run["seed"]: run["accuracy"] for run in arms["stock"]}
            differences = [run["accuracy"] - stock[run["seed"]] for run in runs]
            table[arm]["paired_difference"] = float(np.mean(differences))
            table[arm]["standard_error"] = float(np.std(differences, ddof=1) / np.sqrt(len(differences)))
    return table


def _common(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "runs": len(runs),
        "dead": float(np.mean([run["dead"] for run in runs])),
        "dead_after": float(np.mean([run["dead_after"] for run in runs])),
        "replaced": float(np.mean([run["replay"].get("replay/replaced_fraction", 0.0) for run in runs])),
        "seconds": float(np.median([run["seconds"] for run in runs])),
    }


def draw(results: dict[str, Any], out: Path) -> None:
    """Rewards on the lock into `out`: each seed thin, an arm's median thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.size"] = 14  # can be read on a phone
    figure, axis = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for arm, runs in _by_arm(results["tasks"]["lock"]).items():
        curves = np.array([run["curve"] for run in runs])
        thousands = runs[0]["rollouts"] / 1000 * np.arange(1, curves.shape[1] + 1) / curves.shape[1]
        axis.plot(thousands, curves.T, color=COLORS.get(arm), alpha=0.5, linewidth=0.8)
        axis.plot(
            thousands, np.median(curves, axis=0), color=COLORS.get(arm), linewidth=2.5, label=NAMES.get(arm, arm)
        )
    axis.set(title="combination lock: 5 seeds and their median", ylim=(0, 1.01), xlim=(0, None))
    axis.set(xlabel="thousand completions generated", ylabel="mean reward")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / PICTURE, dpi=110)
    pyplot.close(figure)


def overview(results: dict[str, Any]) -> list[str]:
    """The rows of the table in benchmarks/reports/learning.md, as Markdown."""
    rows = []
    for arm, plain in NAMES.items():
        name = "**replay**" if arm == "corrected" else plain
        lock, addition = (results["tasks"][task]["summary"][arm] for task in ("lock", "addition"))
        there = " runs got there" if arm == "stock" else ""
        gain = difference(addition)
        cells = [
            name,
            f"{_bold(format(lock['reached_median'], ',.0f'), arm)} ({lock['reached_runs']} of {lock['runs']}{there})",
            _final(lock, arm),
            f"{lock['dead'] * 100:.0f} % → {lock['dead_after'] * 100:.0f} %",
            f"{addition['accuracy_mean']:.3f}" + (f", {_bold(gain, arm)}" if gain else ""),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _bold(text: str, arm: str) -> str:
    return f"**{text}**" if arm == "corrected" else text


def _final(row: dict[str, Any], arm: str) -> str:
    low, high = row["final_range"]
    return f"{_bold(format(row['final_median'], '.2f'), arm)} ({low:.2f}–{high:.2f})"


def difference(row: dict[str, Any]) -> str:
    """The paired difference to stock ± its standard error; nothing of stock itself."""
    if "paired_difference" not in row:
        return ""
    return f"{row['paired_difference']:+.3f} ± {row['standard_error']:.3f}".replace("-", "\u2212")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = json.loads((folder / "learning.json").read_text())
    draw(found, folder)
    print("\n".join(overview(found)))
