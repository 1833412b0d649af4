"""The command line: `trl-replay`. Torch and TRL are imported only inside the commands that need them."""

from __future__ import annotations

from .checking import diagnosis
from .commands import main, parser
from .listing import offers

__all__ = ["diagnosis", "main", "offers", "parser"]
