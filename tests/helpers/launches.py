"""What ranks showed, case by case; each number of them is launched once, when it is first asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import check, launch
from one_rank import read

RANKS = Path(__file__).parents[1] / "distributed" / "ranks"
LIMIT = 500
"""Seconds after which a launch counts as hanging."""


class Launches:
    """Launches of a script of tests/distributed/ranks.

    Args:
        script: Its name.
        folder: Where results go.
        arguments: What follows its folder on its command line.
        local_ranks: Of each rank, the number on its machine; of a launch on several machines.
    """

    def __init__(self, script: str, folder: Path, *arguments: Any, local_ranks: tuple[int, ...] = ()) -> None:
        self.script, self.folder, self.arguments, self.local_ranks = RANKS / script, folder, arguments, local_ranks
        self.failures: dict[int, str] = {}

    def start(self, ranks: int, folder: Path) -> None:
        check(
            launch(self.script, folder, *self.arguments, limit=LIMIT, local_ranks=self.local_ranks or (*range(ranks),))
        )

    def begin(self, ranks: int) -> Path:
        """The folder of the results of so many ranks.

        Raises:
            AssertionError: The launch failed, now or before.
        """
        folder = self.folder / str(ranks)
        if not folder.exists():
            folder.mkdir()
            try:
                self.start(ranks, folder)
            except AssertionError as error:
                self.failures[ranks] = str(error)
        assert ranks not in self.failures, self.failures[ranks]
        return folder

    def __call__(self, ranks: int, case: str) -> list[Any]:
        """What every rank wrote for one case, in rank order."""
        return [read(self.begin(ranks) / f"{case}.{rank}.json") for rank in range(ranks)]


def everywhere(ranks: list[dict[str, Any]], step: int, key: str) -> list[Any]:
    """A row list of one step over all ranks, in the order of the rows."""
    return [value for rank in ranks for value in rank["steps"][step][key]]


def assert_same_training(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same rows in the same places, with the same log-probs, in every step."""
    for step in range(len(one["steps"])):
        for key in ("fresh", "out", "replayed"):
            assert everywhere(ranks, step, key) == one["steps"][step][key]
    for kind in ("fresh", "replayed"):
        together = {text: sums for rank in ranks for text, sums in rank["behavior"][kind].items()}
        assert set(together) == set(one["behavior"][kind])
        for text, sums in one["behavior"][kind].items():
            assert together[text][0] == pytest.approx(sums[0], abs=1e-5)
