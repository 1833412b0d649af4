"""Launches a script on two ranks without torchrun, of which either may be on a machine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forked import check, launch


def run_two_ranks(
    script: Path, folder: Path, limit: float, *arguments: str, local_ranks: tuple[int, int] = (0, 1)
) -> list[Any]:
    """Runs `script FOLDER ARGUMENTS`; returns what each rank wrote to `results.RANK.json` there.

    Args:
        script: What to run.
        folder: Where results go.
        limit: Seconds after which the launch counts as hanging.
        arguments: What follows the folder on the command line.
        local_ranks: Of each rank, the number on its machine; (0, 0) stands for two machines.
    """
    check(launch(script, folder, *arguments, limit=limit, local_ranks=local_ranks))
    return [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(2)]
