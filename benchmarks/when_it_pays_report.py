"""What tells beforehand whether replay pays: the rule of plans/when_it_pays.md, on tiny tasks and on a real model.

    python benchmarks/when_it_pays_report.py           # prints the table as Markdown
    python benchmarks/when_it_pays_report.py --stock   # stock's groups at the end of tiny tasks: 20 minutes of a core

Tiny tasks are those of results/efficiency.jsonl, on the real model those of results/when_it_pays.jsonl.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import completions
import numpy as np
import when_it_pays as study

RESULTS = Path(__file__).parent / "results"
KEPT = ("task", "arm", "learning_rate", "seed", "budget", "final_reward", "last_quarter")
STOCK_ON_TINY_TASKS = RESULTS / "when_it_pays_stock.jsonl"
TINY = ("lock", "wide lock", "vault", "long", "addition", "grades", "digits")
GRADED = ("grades", "digits")
"""Rewards there are not 0 and 1 alone: no dead group is known to be all right."""
TINY_ARMS = {"defaults": "defaults", "topr, start=0": "topr", "sample_efficient": "sample_efficient"}
REAL_ARMS = ("defaults", "topr", "imitation", "sample_efficient")
STUCK, GAIN = 0.85, 0.1
"""The rule: replay saves completions where so many of stock's groups are dead and not all right at the end. At first
it was to gain so much."""


@dataclass(frozen=True)
class Dot:
    """An arm on a task. `unsolved` is the share of stock's groups, in the last quarter of its runs, that are dead and
    not all right."""

    task: str
    arm: str
    is_real: bool
    unsolved: float
    gains: tuple[float, ...]
    shares: tuple[float, ...]
    """Of stock's completions to the goal, by seed: below 1 saves some. On tiny tasks it is a reward of 0.25, since
    stock's own end is no goal where stock learns nothing; on the real model it is stock's final accuracy."""

    @property
    def gain(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.gains))

    @property
    def sooner(self) -> int:
        """On how many seeds it is there before stock is."""
        return sum(share < 1 for share in self.shares)

    @property
    def saves(self) -> bool:
        """Completions, on every seed."""
        return self.sooner == len(self.shares)

    @property
    def agrees(self) -> bool:
        """Whether the rule says so."""
        return (self.unsolved >= STUCK) == self.saves

    def __str__(self) -> str:
        share = completions.middle(self.shares)
        times = f", {1 / share:.1f} ×" if 0 < share < 1 else ""
        return f"{self.sooner} of {len(self.shares)}{times}"


def not_all_right(dead: float, reward: float) -> float:
    """The share of groups that are dead and not known to be all right, where rewards are 0 and 1."""
    return dead - max(reward - (1 - dead), 0.0)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A ledger's lines; none without one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tiny_dots() -> list[Dot]:
    """Those of the tiny tasks, whose arms of five updates are compared with stock with as many where it was run."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    reached: dict[tuple[str, str, int], float] = {}
    for line in lines_of(RESULTS / "efficiency.jsonl"):
        if line["seed"] < 50:
            values.setdefault((line["task"], line["arm"]), {})[line["seed"]] = line.get(
                "accuracy", line["final_reward"]
            )
            reached[line["task"], line["arm"], line["seed"]] = line["reached"] or inf
    ends: dict[str, list[float]] = {}
    for line in lines_of(STOCK_ON_TINY_TASKS):
        last = line["last_quarter"]
        graded = line["task"] in GRADED
        unsolved = last["dead"] if graded else not_all_right(last["dead"], last["reward"])
        ends.setdefault(line["task"], []).append(unsolved)
    found = []
    for task in TINY:
        for arm, name in TINY_ARMS.items():
            peer = values.get((task, "stock, 5 iterations")) if arm == "sample_efficient" else None
            peer = peer or values[task, "stock"]
            of_arm = values.get((task, arm), {})
            gains = tuple(of_arm[seed] - peer[seed] for seed in sorted(of_arm) if seed in peer)
            if gains and task in ends:
                both = [(reached[task, arm, seed], reached[task, "stock", seed]) for seed in sorted(of_arm)]
                shares = tuple(mine / theirs if mine < inf else inf for mine, theirs in both)
                found.append(Dot(task, name, False, float(np.mean(ends[task])), gains, shares))
    return found


def real_dots(done: study.Done) -> list[Dot]:
    """Those of the study, whose arms of two updates are compared with stock with as many."""
    found = []
    for name, task in study.TASKS.items():
        ends: list[float] = []
        for run, lines in done.items():
            if (run.task, run.arm) == (name, "stock") and run.seed != study.PILOT:
                late = [line for line in lines if line["batch"] > 0.75 * task.batches]
                ends += [not_all_right(line["frac_reward_zero_std"], line["reward"]) for line in late]
        savings = study.savings_of(done, name)
        for arm in REAL_ARMS:
            peer = "stock" if study.ARMS[arm].iterations == 1 else "stock, 2 updates"
            gains = tuple(study.differences(done, name, arm, peer).values())
            if ends and gains:
                shares = tuple(saving.share for saving in savings[arm])
                found.append(Dot(name, arm, True, float(np.mean(ends)), gains, shares))
    return found


def dots() -> list[Dot]:
    """All of them, the tasks on which most groups are unsolved first."""
    found = [*tiny_dots(), *real_dots(study.STUDY.finished())]
    return sorted(found, key=lambda dot: (-dot.unsolved, dot.task))


def table(found: list[Dot]) -> list[str]:
    """A row a task, as Markdown."""
    arms = list(dict.fromkeys([*TINY_ARMS.values(), *REAL_ARMS]))
    rows = [f"| task | unsolved at stock's end | {' | '.join(arms)} | the rule says | right |"]
    rows.append("|" + "---|" * (len(arms) + 4))
    for task in dict.fromkeys(dot.task for dot in found):
        of_task = {dot.arm: dot for dot in found if dot.task == task}
        first = next(iter(of_task.values()))
        name = f"**{task}**, real" if first.is_real else task
        cells = [str(of_task[arm]) if arm in of_task else "–" for arm in arms]
        says = "saves" if first.unsolved >= STUCK else "saves none"
        right = f"{sum(dot.agrees for dot in of_task.values())} of {len(of_task)}"
        rows.append(f"| {name} | {first.unsolved:.0%} | {' | '.join(cells)} | {says} | {right} |".replace("%", " %"))
    return rows


def verdict(found: list[Dot]) -> str:
    """How often the rule is right."""
    tiny, real = ([dot.agrees for dot in found if dot.is_real == is_real] for is_real in (False, True))
    return f"{sum(tiny)} of {len(tiny)} arms on tiny tasks and {sum(real)} of {len(real)} on the real model"


def run_stock() -> None:
    """Appends stock's runs on the tiny tasks, at the rates and seeds of results/efficiency.jsonl."""
    import toys

    there = {(line["task"], line["seed"]) for line in lines_of(STOCK_ON_TINY_TASKS)}
    for line in lines_of(RESULTS / "efficiency.jsonl"):
        key = line["task"], line["seed"]
        if line["arm"] == "stock" and line["task"] in TINY and line["seed"] < 50 and key not in there:
            record = toys.perform(
                toys.Job(line["task"], "stock", line["learning_rate"], line["seed"], line["budget"], None)
            )
            with STOCK_ON_TINY_TASKS.open("a") as file:
                file.write(json.dumps({name: record[name] for name in KEPT}) + "\n")


if __name__ == "__main__":
    if "--stock" in sys.argv:
        run_stock()
    else:
        print("\n".join([*table(dots()), "", f"The rule is right for {verdict(dots())}."]))
