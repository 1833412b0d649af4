"""`trl-replay demo`: both arms from the same start and seeds, watched live, then a table and a picture."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import lock, puzzle
from .record import THRESHOLD, WINDOW, Record

ARMS: dict[str, dict[str, Any] | None] = {"stock": None, "replay": {}}
LABELS = {"stock": "stock GRPO", "replay": "with replay"}
COLORS = {"stock": "#666666", "replay": "#0b6bcb"}


def show(steps: int, seeds: Sequence[int], out: Path) -> int:
    """Trains every arm on every seed, prints a table, and writes demo.json and demo.png into `out`; returns 0."""
    torch.set_num_threads(1)  # two threads on two cores are many times slower when anything else runs
    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else 120,
    )
    console.print(
        f"A combination lock: {puzzle.KEYS} keys, each opens with one of {len(puzzle.LETTERS) ** 2} codes. The model is "
        "first taught to answer with uniformly random codes, so that nearly every group of completions is all wrong."
    )
    picture = _has_matplotlib()
    if not picture:
        console.print(
            "No picture: matplotlib is not installed. Get it with: pip install 'trl-replay[demo]'",
            markup=False,
        )
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = _train_all(console, steps, seeds)
    finally:
        transformers.logging.set_verbosity(verbosity)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "demo.json"]
    figures = [record.as_dict() for record in records]
    written[0].write_text(json.dumps(figures) + "\n")
    console.print(summary(records))
    console.print(
        f"Seeds {', '.join(map(str, seeds))}, each a lock of its own and the same for both arms; so few show a "
        "difference and do not measure it. Each arm runs at the rate that was its best after 400 updates on other "
        "seeds. benchmarks/learning.py has the fair comparison: longer runs, more seeds, rates chosen by a protocol."
    )
    if picture:
        written.append(out / "demo.png")
        draw(records, written[-1])
    console.print(f"written: {', '.join(map(str, written))}")
    return 0


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _train_all(
    console: Console,
    steps: int,
    seeds: Sequence[int],
) -> list[Record]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    records = []
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        teaching = progress.add_task(
            "teaching random codes",
            total=len(seeds),
            shown="",
        )
        for seed in seeds:
            lock.taught(seed)
            progress.advance(teaching)
        for arm in ARMS:
            for seed in seeds:
                records.append(_train_one(progress, arm, seed, steps))
    return records


def _train_one(progress: Progress, arm: str, seed: int, steps: int) -> Record:
    """Trains one arm on one seed, and shows how it goes in a row of its own."""
    row = progress.add_task(
        f"{LABELS[arm]}, seed {seed}",
        total=steps,
        shown="",
    )

    def advance(record: Record) -> None:
        dead = np.mean(record.dead[-10:])
        after = np.mean(record.dead_after[-10:])
        shown = f"reward {record.final(10):.2f}  dead groups {dead:4.0%} → {after:4.0%}"
        progress.update(row, completed=len(record.reward), shown=shown)

    rate = lock.LEARNING_RATES[arm]
    record = lock.run(arm, seed, rate, steps, ARMS[arm], advance, window=10)
    progress.update(row, completed=steps)
    return record


def by_arm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each arm, arms in the order of their first record."""
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


def summary(records: Sequence[Record]) -> Table:
    """One row an arm: the mean over its seeds, and in brackets each seed's value."""
    steps = len(records[0].reward)
    rollouts = records[0].rollouts
    title = f"{steps} updates and {rollouts:,} rollouts a run; means over seeds, in brackets each seed's"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in (
        "rate",
        f"reward, last {WINDOW} updates",
        f"rollouts until {THRESHOLD}",
        "dead groups generated",
        "trained on",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for arm, runs in by_arm(records).items():
        table.add_row(LABELS[arm], *_cells(runs))
    return table


def _cells(runs: Sequence[Record]) -> list[str]:
    """An arm's row of the table."""
    finals = [run.final(WINDOW) for run in runs]
    each_final = [f"{final:.2f}" for final in finals]
    each_reached = [_reached(run) for run in runs]
    dead = np.mean([run.dead for run in runs])
    dead_after = np.mean([run.dead_after for run in runs])
    seconds = np.mean([run.seconds for run in runs])
    return [
        f"{runs[0].learning_rate:.0e}",
        f"{np.mean(finals):.2f} ({', '.join(each_final)})",
        f"({'; '.join(each_reached)})",
        f"{dead:.0%}",
        f"{dead_after:.0%}",
        f"{seconds:.0f}",
    ]


def _reached(run: Record) -> str:
    count = run.reached()
    return f"{count:,}" if count else "not"


def draw(records: Sequence[Record], path: Path) -> None:
    """Reward, and dead groups among those trained on, over the rollouts generated; seeds thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reward, dead) = pyplot.subplots(
        1,
        2,
        figsize=(11, 4),
        layout="constrained",
    )
    for arm, runs in by_arm(records).items():
        label = f"{LABELS[arm]}, lr {runs[0].learning_rate:.0e}"
        for axis, name in ((reward, "reward"), (dead, "dead_after")):
            curves = np.array([_smooth(getattr(run, name)) for run in runs])  # (seeds, steps)
            steps = curves.shape[1]
            rollouts = np.linspace(0, runs[0].rollouts, steps + 1)[1:]
            color = COLORS[arm]
            axis.plot(rollouts, curves.T, color=color, alpha=0.3, linewidth=0.8)
            mean = curves.mean(axis=0)
            axis.plot(rollouts, mean, color=color, linewidth=2, label=label)
            axis.set_xlabel("rollouts generated")
            axis.set_ylim(0, 1)
    reward.set_title("mean reward of the generated completions")
    dead.set_title("share of dead groups trained on")
    reward.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 20) -> list[float]:
    """Each value averaged with the up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(float(np.mean(window)))
    return means
