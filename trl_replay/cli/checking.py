"""`trl-replay check`: whether the installed packages can be used together."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from .command import Command
from .tables import make_console, make_table

PACKAGES = ("trl-replay", "trl", "torch", "transformers", "accelerate", "pluggy")


def _add_options(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _problems() -> list[str]:
    """Returns what makes the installed TRL unusable."""
    from .. import compat
    from ..errors import ContractError

    try:
        compat.check_release()
        from trl import GRPOTrainer

        return compat.contract_problems(GRPOTrainer)
    except (ContractError, ImportError, RuntimeError) as error:  # TRL's lazy modules raise RuntimeError
        return [str(error)]


def _check(options: argparse.Namespace) -> int:
    from .. import compat

    console = make_console()
    rows = [["python", platform.python_version()], *([name, _version(name)] for name in PACKAGES)]
    console.print(make_table("Installed", ("package", "version"), rows))
    problems = _problems()
    for problem in problems:
        console.print(f"not usable: {problem}", markup=False)
    if not problems:
        console.print(
            f"usable: trl_replay was tested with TRL {compat.TESTED}, and trl.GRPOTrainer has every method that it "
            "wraps, with the parameters that it expects"
        )
    return int(bool(problems))


CHECK = Command("check", "versions, and whether the installed TRL can be used", _add_options, _check)
