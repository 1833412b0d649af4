"""`trl-replay check`: whether the installed packages can be used together."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .command import Command, add_json_option
from .tables import make_console, make_table

PACKAGES = ("trl-replay", "trl", "torch", "transformers", "accelerate", "pluggy")


def diagnosis() -> dict[str, Any]:
    """Versions, the tested TRL releases, and everything that makes the installed TRL unusable."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    problems = [f"{name} is not installed" for name, installed in versions.items() if installed is None]
    tested = None
    if not problems:
        from .. import compat

        tested = str(compat.TESTED)
        problems = _problems_of_trl()
    return {"versions": versions, "tested": tested, "problems": problems, "usable": not problems}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _problems_of_trl() -> list[str]:
    """What makes the installed TRL unusable."""
    from .. import compat
    from ..errors import ContractError

    try:
        compat.check_release()
        from trl import GRPOTrainer

        return compat.contract_problems(GRPOTrainer)
    except (ContractError, ImportError, RuntimeError) as error:  # TRL's lazy modules raise RuntimeError
        return [str(error)]


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
    else:
        console.print("[bold]not usable:[/bold]")
        for problem in result["problems"]:
            console.print(f"  - {problem}", markup=False)
    return status


CHECK = Command("check", "versions, and whether the installed TRL can be used", add_json_option, _check)
