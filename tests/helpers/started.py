"""Runs commands in processes of their own, which import for themselves, as users have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

QUICK = Path(__file__).parent / "quick"
"""Python runs what stands there before all else."""
ROOT = Path(__file__).parents[2]


def quickly(*folders: str | Path) -> str:
    """A PYTHONPATH with these folders, for a process that starts quickly."""
    return os.pathsep.join([str(QUICK), *map(str, folders), os.environ.get("PYTHONPATH", str(ROOT))])


def started(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command by this Python, whose programs come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": quickly(), "PATH": path, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
