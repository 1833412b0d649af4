"""What the demo shows: the outcome in a sentence, a table, and a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from .arms import LABELS
from .lock import GENERATIONS, GROUPS, KEYS, LETTERS, THRESHOLD, WINDOW, Record

COLORS = {"stock": "#666666", "replay": "#0b6bcb"}
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = ".:-=+*#@"
WIDTH = 20
"""Characters of a run's reward in the table."""
INTRODUCTION = f"""\
A combination lock: {KEYS} keys, each opened by one of {len(LETTERS) ** 2} codes. The model begins with random codes,
so nearly every group of {GENERATIONS} answers is all wrong and has no gradient. A tiny model trains with stock
GRPO and with replay, next to each other, in about a minute on two free cores."""
REMARK = """\
One lock shows a difference and does not measure it, and this toy task was made for replay. Whether replay would help
your run: trl-replay estimate OUTPUT_DIR"""


def by_arm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each arm."""
    return {arm: [record for record in records if record.arm == arm] for arm in LABELS}


def outcome(records: Sequence[Record]) -> str:
    """Describe in a sentence what came of it."""
    ends = {arm: np.mean([run.final(WINDOW) for run in runs]) for arm, runs in by_arm(records).items()}
    return (
        f"After {records[0].rollouts:,} completions each, {ends['replay']:.0%} of the answers are right with replay, "
        f"and {ends['stock']:.0%} without."
    )


def table(records: Sequence[Record]) -> Table:
    """A row an arm: means over its seeds, and in brackets each seed's value where there are several."""
    shown = Table(title=f"{len(records[0].reward)} updates, each of {GROUPS * GENERATIONS} completions")
    shown.title_justify = "left"
    shown.add_column("")
    shown.add_column("right over the run", no_wrap=True)
    right = (f"right, last {WINDOW} updates", f"completions to {THRESHOLD:.0%} right")
    for column in (*right, "dead groups generated", "trained on", "seconds"):
        shown.add_column(column, justify="right")
    for arm, runs in by_arm(records).items():
        finals = [f"{run.final(WINDOW):.0%}" for run in runs]
        reached = [f"{count:,}" if (count := run.reached()) else "never" for run in runs]
        each = f" ({', '.join(finals)})" if len(runs) > 1 else ""
        shown.add_row(
            LABELS[arm],
            bars(np.mean([run.reward for run in runs], axis=0).tolist()),
            f"{np.mean([run.final(WINDOW) for run in runs]):.0%}{each}",
            "; ".join(reached),
            f"{np.mean([run.dead for run in runs]):.0%}",
            f"{np.mean([run.dead_after for run in runs]):.0%}",
            f"{np.mean([run.seconds for run in runs]):.0f}",
        )
    return shown


def bars(values: Sequence[float]) -> str:
    """Shares over a run as a line of text."""
    levels = BARS if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN_BARS
    parts = np.array_split(np.array(values), min(WIDTH, len(values)))
    return "".join(levels[min(int(part.mean() * len(levels)), len(levels) - 1)] for part in parts)


def draw(records: Sequence[Record], path: Path) -> str:
    """Write the picture: right answers, and dead groups trained on, over completions; say where it is, or how to get
    it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "For a picture: pip install matplotlib, and run this again."
    figure = Figure(figsize=(11, 4), layout="constrained")
    right, dead = figure.subplots(1, 2)
    for run in records:
        for axes, values in ((right, run.reward), (dead, run.dead_after)):
            axes.plot(run.rollouts_at, smooth(values), color=COLORS[run.arm], label=LABELS[run.arm])
            axes.set(xlabel="completions generated", ylim=(0, 1))
            axes.yaxis.set_major_formatter("{x:.0%}")
            axes.spines[["top", "right"]].set_visible(False)
    right.set_title("right answers")
    dead.set_title("dead groups trained on")
    handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))  # seeds of an arm share one
    right.legend(handles.values(), handles, frameon=False)
    figure.savefig(path, dpi=120)
    return f"written: {path}"


def smooth(values: Sequence[float], width: int = 20) -> list[float]:
    """Each value averaged with the up to `width - 1` before it."""
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]
