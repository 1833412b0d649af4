"""The command line: `trl-replay`. Torch and TRL are imported only inside the commands that need them."""

from __future__ import annotations

from .commands import main, parser

__all__ = ["main", "parser"]
