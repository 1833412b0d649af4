"""`trl-replay check`: whether the installed packages can be used together."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from .command import Command, add_json_option
from .tables import make_console, make_table

PACKAGES = ("trl-replay", "trl", "torch", "transformers", "accelerate", "pluggy")


def diagnosis() -> dict[str, Any]:
    """Versions, the tested TRL releases, and everything that makes the installed TRL unusable."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    problems = [f"{name} is not installed" for name, installed in versions.items() if installed is None]
    tested = None
    drifted: list[str] = []
    if not problems:
        from .. import compat

        tested = str(compat.TESTED)
        problems, drifted = _examine_trl()
    return {"versions": versions, "tested": tested, "problems": problems, "drift": drifted, "usable": not problems}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _examine_trl() -> tuple[list[str], list[str]]:
    """`(problems, drift)` of the installed TRL: what makes it unusable, and what differs in its source."""
    from .. import canary, compat
    from ..errors import ContractError

    try:
        compat.check_release()
        import trl
        from trl import GRPOTrainer

        problems = compat.contract_problems(GRPOTrainer)
        folder = Path(trl.__path__[0])
        return problems, canary.drift(folder)
    except (ContractError, ImportError, RuntimeError) as error:  # TRL's lazy modules raise RuntimeError
        return [str(error)], []


def _check(options: argparse.Namespace) -> int:
    result = diagnosis()
    status = 0 if result["usable"] else 1
    if options.json:
        print(json.dumps(result, indent=2))
        return status
    console = make_console()
    rows = [[name, installed or "not installed"] for name, installed in result["versions"].items()]
    console.print(make_table("Installed", ("package", "version"), rows))
    if result["usable"]:
        console.print(
            f"usable: trl_replay was tested with TRL {result['tested']}, and trl.GRPOTrainer has every method that it "
            "wraps, with the parameters that it expects"
        )
        _show_drift(console, result["drift"])
    else:
        console.print("[bold]not usable:[/bold]")
        _show_items(console, result["problems"])
    return status


def _show_drift(console: Console, drifted: Sequence[str]) -> None:
    """What the drift canary says of the installed TRL's source."""
    if not drifted:
        console.print("its source: callers, batch keys and the order of reads in the loss are those that it relies on")
        return
    console.print("[bold]its source differs from what trl_replay relies on; run-time checks stay on:[/bold]")
    _show_items(console, drifted)


def _show_items(console: Console, items: Sequence[str]) -> None:
    for words in items:
        console.print(f"  - {words}", markup=False)


CHECK = Command("check", "versions, and whether the installed TRL can be used", add_json_option, _check)
