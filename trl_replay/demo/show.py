"""`trl-replay demo`: both arms from the same start and seeds, watched live, then a table and a picture."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import puzzle
from .arms import ARMS, News, train_arms
from .record import THRESHOLD, WINDOW, Record

LABELS = {"stock": "stock GRPO", "replay": "with replay"}
COLORS = {"stock": "#666666", "replay": "#0b6bcb"}
EVERY = 8.0
"""Seconds between two lines of progress in a file or a pipe."""
START, TEACHING, UPDATE = 15.0, 8.0, 0.04
"""Seconds that a run takes on two free cores: to begin with, for each seed, and for each update."""


def show(steps: int, seeds: Sequence[int], out: Path) -> int:
    """Trains every arm on every seed, prints a table, and writes demo.json and demo.png into `out`; returns 0."""
    started = time.monotonic()
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else 120)
    console.print(
        f"A combination lock: {puzzle.KEYS} keys, each opens with one of {len(puzzle.LETTERS) ** 2} codes. The model "
        "is first taught to answer with uniformly random codes, so that nearly every group of completions is all "
        "wrong."
    )
    expected = START + len(seeds) * (TEACHING + steps * UPDATE)
    console.print(
        f"Stock GRPO and replay train side by side, each in a process with one thread: about {_rounded(expected)} s "
        "on two free cores."
    )
    picture = _has_matplotlib()
    if not picture:
        console.print(
            "No picture: matplotlib is not installed. Get it with: pip install 'trl-replay[demo]'", markup=False
        )
    with (Bars if terminal else Lines)(console, steps, seeds) as progress:
        records = train_arms(seeds, steps, progress.hear)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "demo.json"]
    figures = [record.as_dict() for record in records]
    written[0].write_text(json.dumps(figures) + "\n")
    console.print(summary(records))
    console.print(
        f"Seeds {', '.join(map(str, seeds))}, each a lock of its own and the same for both arms; so few show a "
        "difference and do not measure it. Each arm runs at the rate that was its best on other seeds. "
        "benchmarks/learning.py has the fair comparison: longer runs, more seeds, rates chosen by a protocol."
    )
    if picture:
        written.append(out / "demo.png")
        draw(records, written[-1])
    console.print(f"written: {', '.join(map(str, written))} after {time.monotonic() - started:.0f} s")
    return 0


def _rounded(seconds: float) -> int:
    """To ten seconds: more would be pretence."""
    return max(int(round(seconds, -1)), 10)


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


class Bars:
    """A bar for each run, for a terminal."""

    def __init__(self, console: Console, steps: int, seeds: Sequence[int]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=console,
            redirect_stdout=False,
        )
        self._rows: dict[tuple[str, int], TaskID] = {}
        for arm in ARMS:
            for seed in seeds:
                name = f"{LABELS[arm]}, seed {seed}"
                self._rows[arm, seed] = self._progress.add_task(name, total=steps, shown="", start=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def hear(self, news: News | None) -> None:
        """Moves the run's bar."""
        if news is None:
            return
        row = self._rows[news.arm, news.seed]
        self._progress.start_task(row)
        shown = f"reward {news.reward:.2f}  dead groups {news.dead:4.0%} → {news.dead_after:4.0%}"
        self._progress.update(row, completed=news.done, shown=shown)


class Lines:
    """A line every few seconds, for a file or a pipe."""

    def __init__(self, console: Console, steps: int, seeds: Sequence[int]) -> None:
        self._console = console
        self._steps = steps
        self._started = self._last = time.monotonic()
        self._shown = dict.fromkeys(ARMS, "getting ready")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is left open."""

    def hear(self, news: News | None) -> None:
        """Keeps what is new, and prints a line when one is due."""
        if news is not None:
            self._shown[news.arm] = (
                f"seed {news.seed}, update {news.done} of {self._steps}, reward {news.reward:.2f}, "
                f"dead {news.dead:.0%} → {news.dead_after:.0%}"
            )
        now = time.monotonic()
        if now - self._last < EVERY:
            return
        self._last = now
        runs = [f"{LABELS[arm]}: {shown}" for arm, shown in self._shown.items()]
        print(f"{now - self._started:4.0f} s  {'; '.join(runs)}", file=self._console.file, flush=True)


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

    figure, (reward, dead) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
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
    reward.legend(frameon=False, title="thin: each seed; thick: their mean")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 20) -> list[float]:
    """Each value averaged with the up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(float(np.mean(window)))
    return means
