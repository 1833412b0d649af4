"""The real model's table and picture, from its records, for benchmarks/reports/learning.md.

python benchmarks/real_model_report.py benchmarks/results    # draws the picture anew, prints the table as Markdown
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from real_model import ARMS, BATCHES, EVERY, GENERATIONS, GROUPS, PILOTS, Run, records_of

WINDOW = 25
"""Batches over which a reward is a mean."""
COMPLETIONS = GROUPS * GENERATIONS
COLORS = {"stock": "#666666", "defaults": "#0b6bcb", "sample_efficient": "#1a7f37"}
NAMES = {"stock": "stock GRPO", "defaults": "replay"}
HEADINGS = (
    "completions to stock's final reward",
    "final reward",
    "minus stock's",
    "held-out accuracy",
    "minus stock's",
    "dead: generated → trained on",
    "drift",
    "ess",
    "updates",
)

Records = list[dict[str, Any]]


def column(records: Records, name: str, otherwise: str = "") -> list[float]:
    """The values that a run's batches have."""
    values = [record.get(name, record.get(otherwise)) for record in records]
    return [value for value in values if value is not None]


def smoothed(records: Records) -> list[float]:
    """Mean reward of the last `WINDOW` batches, after each batch from that number on."""
    return [float(value) for value in np.convolve(column(records, "reward"), np.full(WINDOW, 1 / WINDOW), "valid")]


def reached(records: Records, target: float) -> int | None:
    """Completions generated when that mean first was `target`; None if it never was."""
    for place, value in enumerate(smoothed(records)):
        if value >= target:
            return (place + WINDOW) * COMPLETIONS
    return None


def finished(found: dict[Run, Records]) -> dict[str, dict[int, Records]]:
    """The reported runs that came to their end, by arm and seed, at each arm's own rate."""
    arms: dict[str, dict[int, Records]] = {}
    for run, records in found.items():
        at_its_rate = run.arm in ARMS and run.rate == ARMS[run.arm].rate
        if run.seed < PILOTS and at_its_rate and records[-1]["batch"] >= BATCHES:
            arms.setdefault(run.arm, {})[run.seed] = records
    return {arm: dict(sorted(arms[arm].items())) for arm in ARMS if arm in arms}


def last_rewards(runs: dict[int, Records]) -> dict[int, float]:
    """The mean reward at the end of each seed's run."""
    return {seed: smoothed(records)[-1] for seed, records in runs.items()}


def last_accuracies(runs: dict[int, Records]) -> dict[int, float]:
    """The accuracy at the end of each seed's run."""
    return {seed: column(records, "accuracy")[-1] for seed, records in runs.items()}


def table(arms: dict[str, dict[int, Records]]) -> list[str]:
    """A row an arm, as Markdown: medians over seeds, with the value of each seed or the range."""
    rows = [f"| | {' | '.join(HEADINGS)} |", f"|{'---|' * (len(HEADINGS) + 1)}"]
    stock = arms.get("stock", {})
    goals = last_rewards(stock)
    for arm, runs in arms.items():
        dead = _mean(runs, "frac_reward_zero_std")
        trained_on = _mean(runs, "replay/dead_fraction_after", "frac_reward_zero_std")
        rewards = last_rewards(runs)
        accuracies = last_accuracies(runs)
        cells = [
            arm,
            _reached([reached(records, goals[seed]) for seed, records in runs.items() if seed in goals]),
            _spread(rewards),
            paired(rewards, goals),
            _spread(accuracies, digits=3),
            paired(accuracies, last_accuracies(stock)),
            f"{100 * dead:.0f} % → {100 * trained_on:.0f} %",
            _or_dash(_mean(runs, "replay/drift_mean")),
            _or_dash(_mean(runs, "replay/ess")),
            str(BATCHES * ARMS[arm].iterations),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def pilots(found: dict[Run, Records]) -> list[str]:
    """A row a pilot, as Markdown: what its first batches showed."""
    rows = [f"| | rate | batches | reward of the first {EVERY} | accuracy after {EVERY} |", f"|{'---|' * 5}"]
    for run, records in found.items():
        if run.seed >= PILOTS:
            first = [record for record in records if record["batch"] <= EVERY]
            reward, accuracy = np.mean(column(first, "reward")), column(first, "accuracy")[-1]
            rows.append(f"| {run.arm} | {run.rate:.0e} | {records[-1]['batch']} | {reward:.2f} | {accuracy:.2f} |")
    return rows


def _reached(values: list[int | None]) -> str:
    """The median, and each seed's; one that never got there counts as later than all."""
    if not values:
        return "–"
    ordered = sorted(value or np.inf for value in values)
    middle = ordered[len(ordered) // 2]
    each = ", ".join("–" if value is None else f"{value:,}" for value in values)
    return f"{'not' if np.isinf(middle) else f'{middle:,.0f}'} ({each})"


def _spread(by_seed: dict[int, float], digits: int = 2) -> str:
    """The median, and the range."""
    values = list(by_seed.values())
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def paired(by_seed: dict[int, float], of_stock: dict[int, float]) -> str:
    """The mean difference to stock with the same seeds, and its standard error."""
    differences = [value - of_stock[seed] for seed, value in by_seed.items() if seed in of_stock]
    return "–" if len(differences) < 2 or by_seed == of_stock else mean_and_error(differences)


def mean_and_error(values: Sequence[float]) -> str:
    """The mean, and its standard error if there are several values."""
    error = f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.3f}{error}".replace("-", "−")


def _mean(runs: dict[int, Records], name: str, otherwise: str = "") -> float:
    values = [value for records in runs.values() for value in column(records, name, otherwise)]
    return float(np.mean(values)) if values else float("nan")


def _or_dash(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}"


def draw(arms: dict[str, dict[int, Records]], path: Path) -> None:
    """Reward and held-out accuracy over completions; each seed thin, their median thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.size"] = 14  # can be read on a phone
    figure, (reward, accuracy) = pyplot.subplots(2, figsize=(7, 8.5), sharex=True, layout="constrained")
    for arm, runs in arms.items():
        color = COLORS[arm]
        curves = np.array([smoothed(records) for records in runs.values()])
        completions = (np.arange(curves.shape[1]) + WINDOW) * COMPLETIONS
        reward.plot(completions, curves.T, color=color, alpha=0.25, linewidth=0.8)
        reward.plot(completions, np.median(curves, axis=0), color=color, linewidth=2, label=NAMES.get(arm, arm))
        of_seeds = np.array([column(records, "accuracy") for records in runs.values()])
        measured = [record["batch"] * COMPLETIONS for record in next(iter(runs.values())) if "accuracy" in record]
        accuracy.plot(measured, of_seeds.T, color=color, alpha=0.25, linewidth=0.8)
        accuracy.plot(measured, np.median(of_seeds, axis=0), color=color, linewidth=2)
    reward.set(title="SmolLM2-135M on sums", ylabel=f"reward, mean of {WINDOW} batches", ylim=(0, 0.7))
    accuracy.set(xlabel="completions generated", ylabel="held-out accuracy, greedy", ylim=(0, 0.7))
    for axis in (reward, accuracy):
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*reward.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    every_run = records_of(folder / "real_model.jsonl")
    of_sums = finished(every_run)
    draw(of_sums, folder / "real_model.png")
    print("\n".join([*table(of_sums), "", *pilots(every_run)]))
