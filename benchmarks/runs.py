"""Runs by a plan, a line a measurement in a ledger: which are whole, which are left, and who trains them.

    python benchmarks/STUDY.py            # trains what is left, by benchmarks/plans; several processes may share it
    python benchmarks/STUDY.py --left     # only prints which runs are left
    python benchmarks/STUDY.py --collect  # only appends whole runs of --out to benchmarks/results
    python benchmarks/STUDY.py --table    # only prints the tables of benchmarks/reports

Runs append to NAME.jsonl in --out. One that was cut off begins anew; one that is whole, there or in
benchmarks/results, is not repeated. Each process locks its run's file in --out.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PILOT = 100
"""The seed of pilots, which choose rates and are not reported."""
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One run."""

    task: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its claim."""
        return f"{self.task} {self.arm} {self.rate} {self.seed}"


Done = dict[Run, Lines]


def ledger(*paths: Path) -> Done:
    """The lines of each run, of the first ledger first; of one that began anew the last ones."""
    found: Done = {}
    texts = [path.read_text() for path in paths if path.exists()]
    for text in "".join(texts).splitlines():
        line = json.loads(text)
        run = Run(line["task"], line["arm"], line["rate"], line["seed"])
        if line["batch"] == 0:
            found[run] = []
        found[run].append(line)
    return found


@contextmanager
def claimed(run: Run, out: Path) -> Iterator[bool]:
    """Whether the run is this process's; the lock of one that died is free."""
    with (out / f"{run.name}.claim").open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@dataclass(frozen=True)
class Study:
    """What is run under one name.

    Attributes:
        name (`str`): Of its ledger, and of the folder of its runs in `out`.
        is_whole (`Callable`): Whether a line is the last one of a run.
        queue (`Callable`): All runs that can be said by what is whole, those first that matter most.
    """

    name: str
    is_whole: Callable[[Run, dict[str, Any]], bool]
    queue: Callable[[Done], Iterable[Run]]

    def finished(self, *paths: Path) -> Done:
        """The runs that are whole, those in benchmarks/results first."""
        there = ledger(RESULTS / f"{self.name}.jsonl", *paths)
        return {run: lines for run, lines in there.items() if self.is_whole(run, lines[-1])}

    def left(self, *paths: Path) -> list[Run]:
        """The runs of the queue that are not whole."""
        done = self.finished(*paths)
        return [run for run in dict.fromkeys(self.queue(done)) if run not in done]

    def collect(self, path: Path) -> list[Run]:
        """Appends the runs of a ledger that are whole, and are not in benchmarks/results yet."""
        new = self.finished(path).keys() - self.finished().keys()
        with (RESULTS / f"{self.name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for run, of in ledger(path).items() if run in new for line in of)
        return sorted(new, key=lambda run: run.name)

    def main(
        self,
        doc: str | None,
        report: Callable[[Done], list[list[str]]],
        perform: Callable[[Run, Path], object],
        arguments: list[str] | None = None,
    ) -> int:
        """Runs the benchmark: `report` makes its tables, and `perform` trains a run, whose lines a ledger gets."""
        parser = argparse.ArgumentParser(
            description=f"{doc}\n{__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for flag, does in (
            ("left", "print which runs are left"),
            ("collect", "append whole runs to benchmarks/results"),
            ("table", "print what there is"),
        ):
            parser.add_argument(f"--{flag}", action="store_true", help=f"only {does}")
        parser.add_argument("--tasks", nargs="+", help="which tasks to run; all if not given")
        parser.add_argument("--out", type=Path, default=Path("out") / self.name, help="folder of models and ledger")
        options = parser.parse_args(arguments)
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{self.name}.jsonl"

        def left() -> list[Run]:
            return [run for run in self.left(path) if not options.tasks or run.task in options.tasks]

        if options.left or options.collect:
            print("\n".join(run.name for run in (left() if options.left else self.collect(path))))
        elif options.table:
            print("\n\n".join("\n".join(table) for table in report(self.finished(path))))
        else:
            train_all(left, options.out, lambda run: perform(run, path))
        return 0


def train_all(left: Callable[[], Iterable[Run]], out: Path, perform: Callable[[Run], object]) -> None:
    """Trains what is left, one run after the other, until other processes have the rest."""
    os.nice(19)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own renamings
    tried: set[Run] = set()
    while runs := [run for run in left() if run not in tried]:
        tried.add(run := runs[0])
        with claimed(run, out) as is_mine:
            if is_mine and run in left():
                perform(run)
                print(f"{run.name}: done", flush=True)
