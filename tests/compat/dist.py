"""Builds what would be uploaded, checks it, and trains with it outside of this tree: `make dist`.

The source distribution and the wheel of the package each come into a fresh environment with a release of TRL (see
run.py), without asking a package index. There a tiny trainer replays. Then the wheels of the plugins come beside them,
and `trl-replay list` shows what is built in and what a plugin offers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from run import RELEASES, ROOT, fresh_environment, packages

PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
DIST = ROOT / "dist"
ENVIRONMENTS = ROOT / "out" / "dist"
SMOKE = """
import json
import sys
import warnings

import trl_replay
from trl_replay.testing import make_trainer

warnings.simplefilter("ignore", FutureWarning)


def reward(completions, **_):
    '''Of three groups the first is live.'''
    return [float(row == 0) for row in range(len(completions))]


trainer = make_trainer(sys.argv[1], reward, max_steps=2)
session = trl_replay.attach(trainer)
trainer.train()
replaced = session.totals.counters["replaced"]
trl_replay.detach(trainer)
print("SMOKE" + json.dumps([trl_replay.__file__, trl_replay.__version__, replaced]))
"""


def main() -> int:
    """Prints a line for each distribution and release; 0 if all is well, and an error that says what is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="TRL releases; the pinned one if none")
    parser.add_argument("--all", action="store_true", help="every release that run.py knows")
    options = parser.parse_args()
    source, wheel = build(ROOT)
    check_metadata(ROOT, source, wheel)
    plugins = []
    for project in PLUGINS:
        plugin_source, plugin = build(project)
        check_metadata(project, plugin_source, plugin)
        plugins.append(plugin)
    for release in list(RELEASES) if options.all else options.releases or [pinned("trl")]:
        for distribution in (source, wheel):
            replaced = try_out(distribution, plugins, release)
            print(f"{distribution.name} beside TRL {release}: trains, {replaced:.0f} groups replaced", flush=True)
    return 0


def pinned(package: str) -> str:
    """The version in constraints.txt."""
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[1]


def build(project: Path) -> tuple[Path, Path]:
    """Source distribution and wheel of a project, in `dist/`; the wheel is made from the source distribution."""
    scratch = ENVIRONMENTS / f"build-{project.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", scratch, cwd=project)
    (source,) = scratch.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(scratch, filter="data")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch, cwd=next(scratch.glob("*/")))
    (wheel,) = scratch.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return shutil.copy(source, DIST / source.name), shutil.copy(wheel, DIST / wheel.name)


def check_metadata(project: Path, source: Path, wheel: Path) -> None:
    """Twine objects to nothing, both say the same of themselves, and the description is the README
    with links that lead somewhere there."""
    call(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        of_wheel = archive.read(info).decode()
    with tarfile.open(source) as archive:
        name = source.name.removesuffix(".tar.gz")
        file = archive.extractfile(f"{name}/PKG-INFO")
        assert file is not None
        of_source = file.read().decode()
    assert of_wheel == of_source, "wheel and source distribution have different metadata"
    metadata: Message = Parser().parsestr(of_wheel)
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert text.startswith((project / "README.md").read_text()[:200])
    assert not re.search(r"\]\((?!https:)", text), "a link that leads nowhere on a package index"


def try_out(distribution: Path, plugins: list[Path], release: str) -> float:
    """Trains with `distribution`, and then lists what is on offer, with the plugins too; how many groups replay
    replaced."""
    python = fresh_environment(ENVIRONMENTS / f"{release}-{distribution.suffix.strip('.')}", release)
    install(python, distribution)
    with tempfile.TemporaryDirectory() as outside:
        printed = call(python, "-c", SMOKE, "run", cwd=Path(outside))
    file, version, replaced = json.loads(printed.partition("SMOKE")[2])
    assert Path(file).is_relative_to(packages(python)), f"{file} was imported instead of what was installed"
    assert f"-{version}" in distribution.name
    assert replaced > 0, "nothing was replayed"
    for plugin in plugins:
        install(python, plugin)
    with tempfile.TemporaryDirectory() as outside:
        listed = call(python.parent / "trl-replay", "list", cwd=Path(outside))
    names = set(re.findall(r"^│ \w+ +│ (\S+)", listed, re.MULTILINE))
    offered = {"prompt_balanced", "zero_std", "ratio", "freshness/half_life"}
    assert offered <= names, f"not listed: {offered - names}"
    assert "were not loaded" not in listed, listed
    return float(replaced)


def install(python: Path, distribution: Path) -> None:
    """Installs a file into an environment without asking a package index for anything."""
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall", "--no-warn-script-location")
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", *offline, distribution)


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """The output of a command; the error's if it fails."""
    variables = {"TRITON_INTERPRET": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
