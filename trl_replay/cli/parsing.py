"""argparse with two habits of our own: commands after `--` are never read, and a mistyped command gets the nearest."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

PASS_ON = ("run", "example")
"""Commands that take another command line after `--`."""


class Parser(argparse.ArgumentParser):
    """Options of a command in `PASS_ON` get two more: `passed_on`, what stands after `--` (None without one), and
    `unknown`, what no option took."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options, as argparse gives them."""
        given = list(sys.argv[1:] if args is None else args)
        if not given or given[0] not in PASS_ON:
            return super().parse_args(given, namespace)
        passed_on = None
        if "--" in given:
            at = given.index("--")
            given, passed_on = given[:at], given[at + 1 :]
        options, unknown = self.parse_known_args(given, namespace)
        options.passed_on = passed_on
        options.unknown = unknown
        return options

    def error(self, message: str) -> NoReturn:
        """Ends with status 2, and says what was probably meant."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += f". Did you mean {near[0]!r}?" if near else ""
        super().error(message)
