"""One rank of the launch of tests/test_presets.py: every preset in turn, results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from one_rank import perform
from resuming import interrupted


def resumed(folder: Path, **settings: Any) -> dict[str, Any]:
    whole, differences = interrupted(folder, **settings)
    return {"differences": differences, "replaced": whole["totals"][1]["replaced"], "weights": whole["weights"]}


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, settings in json.loads((folder / "runs.json").read_text()).items():
        yield name, partial(resumed, folder / name, **settings)


if __name__ == "__main__":
    perform(Path(sys.argv[1]), cases(Path(sys.argv[1])))
