"""`trl-replay example`: the example scripts, which travel in the wheel."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ..errors import ReplayError, UnknownNameError
from .command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "trl-replay example [NAME] [--out FOLDER] [--run] [-- OPTIONS…]"
    parser.add_argument("name", nargs="?", help="an example's name or its beginning; all are listed without one")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to copy it to; this one if not given")
    parser.add_argument(
        "--run",
        dest="start",
        action="store_true",
        help="install the packages that it names, and run it with the options after --",
    )


def _run(options: argparse.Namespace) -> int:
    if options.unknown:
        raise ReplayError(f"{' '.join(options.unknown)}: the options of an example stand after --")
    if options.name is None:
        for name, script in examples().items():
            print(f"{name:20} {summary(script)}")
        return 0
    script = find(options.name)
    paths = copy(script, options.out)
    arguments = _arguments(paths)
    if options.start:
        return _start(script, [*arguments, *(options.passed_on or [])])
    for path in paths:
        print(f"written: {path}")
    print("to run it:")
    for line in [*packages(script), shlex.join(["python", *arguments])]:
        print(f"    {line}")
    return 0


def folder() -> Path:
    """Of the examples: the package's own, or in a checkout the repository's."""
    package = Path(__file__).parents[1]
    packed = package / "examples"
    return packed if packed.is_dir() else package.parent / "examples"


def examples() -> dict[str, Path]:
    """The scripts by name."""
    return {script.stem: script for script in sorted(folder().glob("*.py"))}


def find(name: str) -> Path:
    """The script of that name, or the only one whose name begins so."""
    known = examples()
    matches = [name] if name in known else [full for full in known if full.startswith(name)]
    if len(matches) == 1:
        return known[matches[0]]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"There is no example {name!r}.{hint} There are: {', '.join(known)}.")


def summary(script: Path) -> str:
    """The first line of a script's docstring."""
    return _docstring(script).partition("\n")[0]


def packages(script: Path) -> list[str]:
    """The lines of a script's docstring that install what it needs beside trl-replay."""
    return re.findall(r"^ +(pip install .*)$", _docstring(script), re.MULTILINE)


def copy(script: Path, out: Path) -> list[Path]:
    """Copies the script, and the files of its name beside it; returns where they are, the script first.

    Raises:
        ReplayError: Another file of that name is there; nothing is copied.
    """
    sources = [script, *sorted(set(script.parent.glob(f"{script.stem}.*")) - {script})]
    targets = [out / source.name for source in sources]
    for source, target in zip(sources, targets, strict=True):
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise ReplayError(f"{target} is there already and differs: remove it, or give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    for source, target in zip(sources, targets, strict=True):
        target.write_bytes(source.read_bytes())
    return targets


def _arguments(paths: list[Path]) -> list[str]:
    script, *others = map(str, paths)
    config = [path for path in others if path.endswith(".yaml")]
    return [script, "--config", *config] if config else [script]


def _start(script: Path, arguments: list[str]) -> int:
    """Runs a copy with this Python, once its packages are there; returns its exit status."""
    for line in packages(script):
        print(line, flush=True)
        command = [sys.executable, "-m", *shlex.split(line), "--quiet", "--disable-pip-version-check"]
        if subprocess.call(command) != 0:
            raise ReplayError(f"the packages could not be installed; try it by hand: {line}")
    return subprocess.call([sys.executable, *arguments])


def _docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text())) or ""


EXAMPLE = Command("example", "lists the example scripts, copies one, or runs it", _add_options, _run)
