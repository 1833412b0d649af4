"""The command line: `trl-replay`."""

from __future__ import annotations

from .commands import diagnosis, main, offers, parser

__all__ = ["diagnosis", "main", "offers", "parser"]
