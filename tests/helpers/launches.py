"""Results of ranks, case by case; each number of them is launched once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import check, launch
from one_rank import read

RANKS = Path(__file__).parents[1] / "distributed" / "ranks"
LIMIT = 500
"""Seconds after which a launch counts as hanging."""


class Launches:
    """Launches of a module of tests/distributed/ranks.

    Args:
        module: Its name.
        folder: Where results go.
        arguments: What its cases are made of, or their names (ranks/run.py).
        local_ranks: Of each rank, the number on its machine; of a launch on several machines.
    """

    def __init__(self, module: str, folder: Path, *arguments: Any, local_ranks: tuple[int, ...] = ()) -> None:
        self.module, self.folder, self.arguments, self.local_ranks = module, folder, arguments, local_ranks
        self.failures: dict[int, str] = {}

    def start(self, ranks: int, folder: Path) -> None:
        local_ranks = self.local_ranks or (*range(ranks),)
        check(launch(RANKS / "run.py", folder, self.module, *self.arguments, limit=LIMIT, local_ranks=local_ranks))

    def begin(self, ranks: int) -> Path:
        """The folder of the results of so many ranks, which are launched once."""
        folder = self.folder / str(ranks)
        if not folder.exists():
            folder.mkdir()
            try:
                self.start(ranks, folder)
            except AssertionError as error:
                self.failures[ranks] = str(error)
        return folder

    def __call__(self, ranks: int, case: str) -> list[Any]:
        """The results of every rank for one case, in rank order.

        Raises:
            AssertionError: The launch failed before all ranks had performed it.
        """
        paths = [self.begin(ranks) / f"{case}.{rank}.json" for rank in range(ranks)]
        assert all(path.exists() for path in paths), self.failures.get(ranks, f"there is no case {case!r}")
        return [read(path) for path in paths]


def side_by_side(module: str, folder: Path, ranks: int, *apart: Sequence[str]) -> Callable[[str], list[Any]]:
    """The results of every rank of a module with a process for each case, by case.

    Each of `apart` has cases in which ranks wait in vain, and a launch to itself beside that of all others: there is
    little to compute.
    """
    names = [("all but", *(case for cases in apart for case in cases)), *apart]
    made = [Launches(module, folder / str(number), *cases) for number, cases in enumerate(names)]
    for one in made:
        one.folder.mkdir()
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda one: one.begin(ranks), made))
    of = {case: one for one, cases in zip(made[1:], apart, strict=True) for case in cases}
    return lambda case: of.get(case, made[0])(ranks, case)


def everywhere(ranks: list[dict[str, Any]], step: int, key: str) -> list[Any]:
    """A row list of one step over all ranks, in the order of the rows."""
    return [value for rank in ranks for value in rank["steps"][step][key]]


def assert_same_training(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same rows in the same places, with the same log-probs, in every step."""
    for step in range(len(one["steps"])):
        for key in ("fresh", "out", "replayed"):
            assert everywhere(ranks, step, key) == one["steps"][step][key]
    for kind in ("fresh", "replayed"):
        together: dict[str, list[float]] = {}
        for rank in ranks:
            for text, sums in rank["behavior"][kind].items():
                together.setdefault(text, []).extend(sums)  # one text may be of several rows, on several ranks
        assert set(together) == set(one["behavior"][kind])
        for text, sums in one["behavior"][kind].items():
            assert sorted(together[text]) == pytest.approx(sorted(sums), abs=1e-5)


def assert_same_gradients(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The whole gradient of every update, which all ranks have."""
    for step, (gradient, expected) in enumerate(zip(ranks[0]["gradients"], one["gradients"], strict=True)):
        error = np.linalg.norm(np.subtract(gradient, expected)) / max(float(np.linalg.norm(expected)), 1e-9)
        assert error < 1e-5, f"step {step}: the gradient is off by {error:.1e}"


def check_one_table(ranks: list[dict[str, Any]]) -> None:
    """The same entries after every step, and the same ones drawn."""
    assert len(set(ranks[0]["hashes"])) >= 4, "the table changes"
    for rank in ranks[1:]:
        assert rank["hashes"] == ranks[0]["hashes"]
        assert rank["drawn"] == ranks[0]["drawn"]


def check_batches_of_all(ranks: list[dict[str, Any]]) -> None:
    """On every rank the tokens and marks of all rows that are trained on, and the keys that went in."""
    for step in range(len(ranks[0]["steps"])):
        shown = [rank["steps"][step] for rank in ranks]
        total = sum(one["trained"] for one in shown)
        for one in shown:
            assert one["items"] == total
            assert one["keys"][0] == one["keys"][1]


def check_groups(ranks: list[dict[str, Any]], size: int) -> tuple[int, int]:
    """A replayed group is one stored group, whole, in order and with its advantages, and in no batch twice; how many
    were replayed, and how many of them on other ranks than where they were generated."""
    born: dict[str, tuple[int, int, float]] = {}
    traveled = replayed = 0
    rows = len(ranks[0]["steps"][0]["fresh"])
    for step in range(len(ranks[0]["steps"])):
        keys = ("out", "replayed", "advantages_out", "fresh", "advantages_in")
        out, flags, advantages, fresh, values = (everywhere(ranks, step, key) for key in keys)
        seen = set()
        for first in range(0, len(out), size):
            slot = slice(first, first + size)
            assert len(set(flags[slot])) == 1, "a slot is filled on all the ranks that it straddles, or on none"
            if not flags[first]:
                assert out[slot] == fresh[slot]
                continue
            origins = [born[text] for text in out[slot]]
            when, where, _ = origins[0]
            assert where % size == 0, "its first row is a group's first row"
            assert [(origin[0], origin[1]) for origin in origins] == [(when, where + place) for place in range(size)]
            assert advantages[slot] == [origin[2] for origin in origins], "TRL's own advantages, with their rows"
            assert when < step
            assert (when, where) not in seen, "no group twice in a batch"
            seen.add((when, where))
            replayed += 1
            traveled += any((where + place) // rows != (first + place) // rows for place in range(size))
        born |= {text: (step, row, values[row]) for row, text in enumerate(fresh)}
    return replayed, traveled
