"""`trl-replay run`: any command, with replay attached to every GRPOTrainer that trains in it.

The command's processes find our `sitecustomize` through PYTHONPATH (see `bootstrap`), attach, and leave reports in a
folder. They decide nothing: whether all is well is judged here, when the command has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError
from ..extras.run import bootstrap
from ..extras.run.bootstrap.sitecustomize import VARIABLE
from ..extras.run.receipts import judge, read
from .command import Command
from .settings import HINTS, add_settings, given_settings

NAME = "trl-replay run"
EXAMPLE = f"{NAME} -- python train.py"
ENDED_BY_SIGNAL = 128
"""With the signal's number added, the exit status that a shell gives."""
FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that are passed on to the command, as far as the system has them. Ctrl-C reaches it by itself."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{NAME} [--replay_… VALUE]… [--config FILE] -- COMMAND…"
    parser.allow_abbrev = False
    add_settings(parser)


def _run(options: argparse.Namespace) -> int:
    command = _command(options)
    settings = given_settings(options, NAME)
    # a process that outlives the command may still write there while it is removed
    with tempfile.TemporaryDirectory(prefix="trl-replay-", ignore_cleanup_errors=True) as reports:
        status = _call(command, _environment(settings, reports))
        verdict = judge(read(Path(reports)), status, _misplaced(command))
        _pass_on(Path(reports))
    if verdict.message:
        print(f"{NAME}: {verdict.message}", file=sys.stderr)
    return verdict.status


def _command(options: argparse.Namespace) -> list[str]:
    if options.unknown and not (options.command and options.unknown[0].startswith("--")):
        raise ConfigurationError(f"{' '.join(options.unknown)}: put -- before the command, as in {EXAMPLE}")
    if not options.command:
        raise ConfigurationError(f"Give a command after --, as in {EXAMPLE}")
    if Path(options.command[0]).name == "trl" and (misplaced := _misplaced(options.command)):
        raise ConfigurationError(
            f"{', '.join(misplaced)}: trl has no such settings. Put them before --, or into a YAML file that {NAME} "
            "--config names."
        )
    return list(options.command)


def _misplaced(command: Sequence[str]) -> list[str]:
    """Return replay settings among a command's arguments and in its YAML file."""
    words = [word.partition("=")[0] for word in command if word.startswith("--")]
    names = [word[2:].replace("-", "_") for word in words]
    files = [path for flag, path in itertools.pairwise(command) if flag == "--config"]
    files += [word.removeprefix("--config=") for word in command if word.startswith("--config=")]
    for path in files:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            if isinstance(found := yaml.safe_load(Path(path).read_text()), dict):
                names += map(str, found)
    return [name for name in names if name in HINTS]


def _environment(settings: Mapping[str, Any], reports: str) -> dict[str, str]:
    """Return this process's environment with the hook first on PYTHONPATH."""
    hook = str(Path(bootstrap.__file__).resolve().parent)
    entries = [hook]
    if os.environ.get("PYTHONPATH"):
        before = os.environ["PYTHONPATH"].split(os.pathsep)
        entries += [entry for entry in before if entry != hook]
    given = {"settings": settings, "reports": reports, "hook": hook}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), VARIABLE: json.dumps(given)}


def _call(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command; return its exit status."""
    try:
        process = subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        raise ConfigurationError(f"There is no command {command[0]!r}: check its name, as in {EXAMPLE}") from None
    except PermissionError:
        raise ConfigurationError(
            f"{command[0]!r} can't be started: put python before a script, as in {EXAMPLE}"
        ) from None
    with _signals_passed_to(process):
        status = process.wait()
    return status if status >= 0 else ENDED_BY_SIGNAL - status


def _pass_on(reports: Path) -> None:
    """Forward the reports of this run's processes to the run that started this one, if any."""
    with contextlib.suppress(KeyError, ValueError, TypeError, OSError):
        outer = Path(json.loads(os.environ[VARIABLE])["reports"])
        for path in reports.glob("*.json"):
            if path.is_file():  # nobody waits for a pipe
                shutil.copy2(path, outer)


@contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


RUN = Command("run", "any command, with replay attached to every GRPOTrainer that trains in it", _add_options, _run)
