"""The learning benchmark's JSON, tables, thresholds and picture, from its runs' records.

python benchmarks/learning_report.py benchmarks/results    # draws the picture anew, prints the tables as Markdown
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from lock import THRESHOLD
from rich.console import Console
from rich.table import Table

REACHED_SHARE = 1 / 5
FINAL_REWARD = 0.85
COLORS = {"stock": "#666666", "corrected": "#0b6bcb", "uncorrected": "#c44601"}
NAMES = {"stock": "stock GRPO", "corrected": "replay", "uncorrected": "replay, uncorrected"}
PICTURES = {"lock": "learning.png", "addition": "learning_addition.png"}


def summarize(tasks: dict[str, Any], arms: dict[str, Any], out: Path, quick: bool) -> dict[str, Any]:
    """Writes learning.json and learning.png into `out`, prints the tables, and returns what it wrote."""
    results: dict[str, Any] = {
        "quick": quick,
        "versions": {name: version(name) for name in ("trl-replay", "trl", "torch", "transformers")},
        "python": platform.python_version(),
        "arms": arms,
        "thresholds": [],
        "tasks": {},
    }
    console = Console(width=None if sys.stdout.isatty() else 140)
    if quick:
        console.print("[bold]QUICK: a few steps only; the figures mean nothing.[/bold]")
    for task, result in tasks.items():
        table = _addition(result) if task == "addition" else _lock(result)
        results["tasks"][task] = {**result, "summary": table}
        console.print(_rich(task, result, table))
    if not quick:
        checks = {"lock": _lock_thresholds, "addition": _addition_thresholds}
        results["thresholds"] = [check for task in tasks for check in checks[task](results["tasks"][task]["summary"])]
        for check in results["thresholds"]:
            console.print(f"{'met   ' if check['met'] else 'MISSED'} {check['text']}: {check['value']:.3f}")
    (out / "learning.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, out)
    console.print(f"written: {out / 'learning.json'}, and beside it {', '.join(PICTURES[task] for task in tasks)}")
    return results


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


def _lock_thresholds(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    share = table["corrected"]["reached_median"] / table["stock"]["reached_median"]
    final = table["corrected"]["final_median"]
    return [
        {
            "text": f"lock: corrected reaches {THRESHOLD} with at most {REACHED_SHARE} of stock's rollouts (medians)",
            "value": share,
            "met": share <= REACHED_SHARE,
        },
        {
            "text": f"lock: corrected ends at {FINAL_REWARD} or more (median)",
            "value": final,
            "met": final >= FINAL_REWARD,
        },
    ]


def _addition_thresholds(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    row = table["corrected"]
    least = -2 * row["standard_error"]
    text = (
        f"addition: corrected's paired difference to stock is at least -2 standard errors ({least:.3f}), with "
        f"{row['replaced']:.0%} of the groups replaced"
    )
    return [{"text": text, "value": row["paired_difference"], "met": row["paired_difference"] >= least}]


def _rich(task: str, result: dict[str, Any], table: dict[str, dict[str, Any]]) -> Table:
    protocol = result["protocol"]
    rich = Table(title=f"{task}: {protocol['steps']} steps, seeds {list(protocol['seeds'])}")
    lock = task != "addition"
    columns = ["arm", "rate", "dead groups, generated → trained on", "groups replaced", "seconds"]
    columns[2:2] = (
        [f"rollouts to {THRESHOLD}, median", "runs that reached", "final reward, median (range)"]
        if lock
        else ["accuracy, mean (start)", "paired difference to stock ± SE"]
    )
    for column in columns:
        rich.add_column(column, justify="left" if column == "arm" else "right")
    for arm, row in table.items():
        if lock:
            low, high = row["final_range"]
            cells = [
                f"{row['reached_median']:,.0f}",
                f"{row['reached_runs']}/{row['runs']}",
                f"{row['final_median']:.2f} ({low:.2f}–{high:.2f})",
            ]
        else:
            difference = "–"
            if "paired_difference" in row:
                difference = f"{row['paired_difference']:+.3f} ± {row['standard_error']:.3f}"
            cells = [f"{row['accuracy_mean']:.3f} ({row['start_accuracy']:.3f})", difference]
        dead = f"{row['dead']:.0%} → {row['dead_after']:.0%}"
        replaced = "–" if arm == "stock" else f"{row['replaced']:.0%}"
        rich.add_row(arm, f"{row['learning_rate']:.0e}", *cells, dead, replaced, f"{row['seconds']:.0f}")
    chosen = "; ".join(
        f"{arm} {', '.join(f'{rate}: {mean:.3f}' for rate, mean in rates.items())}"
        for arm, rates in result["selection"].items()
    )
    rich.caption = (
        f"Rates chosen by final reward, mean of the unreported seeds {list(protocol['selection_seeds'])}: {chosen}"
    )
    return rich


def draw(results: dict[str, Any], out: Path) -> None:
    """A picture a task into `out`: each seed thin or a dot, an arm's median or mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.size"] = 14  # can be read on a phone
    for task, result in results["tasks"].items():
        figure, axis = pyplot.subplots(figsize=(7, 5), layout="constrained")
        (_draw_accuracies if task == "addition" else _draw_rewards)(axis, result)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(out / PICTURES[task], dpi=110)
        pyplot.close(figure)


def _draw_rewards(axis: Any, result: dict[str, Any]) -> None:
    for arm, runs in _by_arm(result).items():
        curves = np.array([run["curve"] for run in runs])
        thousands = runs[0]["rollouts"] / 1000 * np.arange(1, curves.shape[1] + 1) / curves.shape[1]
        axis.plot(thousands, curves.T, color=COLORS.get(arm), alpha=0.2, linewidth=0.8)
        axis.plot(
            thousands, np.median(curves, axis=0), color=COLORS.get(arm), linewidth=2.5, label=NAMES.get(arm, arm)
        )
    axis.set(title="combination lock, tiny model, 5 seeds", ylim=(0, 1.01), xlim=(0, None))
    axis.set(xlabel="thousand completions generated", ylabel="mean reward")


def _draw_accuracies(axis: Any, result: dict[str, Any]) -> None:
    for number, (arm, runs) in enumerate(_by_arm(result).items()):
        accuracies = [run["accuracy"] for run in runs]
        axis.scatter([number] * len(runs), accuracies, color=COLORS[arm], alpha=0.5)
        ends = [number - 0.2, number + 0.2]
        axis.plot(ends, [np.mean(accuracies)] * 2, color=COLORS[arm], linewidth=2.5, label=NAMES[arm])
    start = result["runs"][0]["start_accuracy"]
    axis.axhline(start, color="black", linewidth=0.8, linestyle=":", label="before training")
    axis.set(title="3-digit addition, tiny model, 5 seeds", ylabel="held-out accuracy", xticks=[], ylim=(0, 0.3))


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


def headline(results: dict[str, Any]) -> list[str]:
    """The rows of README.md's table, as Markdown."""
    rows = []
    for arm in ("stock", "corrected"):
        lock = results["tasks"]["lock"]["summary"][arm]
        cells = [
            NAMES[arm],
            f"{lock['reached_median']:,.0f} ({lock['reached_runs']} of {lock['runs']} runs)",
            f"{lock['final_median']:.2f}",
            f"{lock['dead_after'] * 100:.0f} %",
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
