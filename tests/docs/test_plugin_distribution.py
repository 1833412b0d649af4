"""The wheels of core and plugin as users get them; `make dist` trains with them in an environment of their own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "trl-replay-freshness"


@pytest.fixture
def wheels(tmp_path):
    """The wheels of both distributions: `(core, plugin)`."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, ROOT, PLUGIN], env=environment, check=True, capture_output=True)
    (core,) = tmp_path.glob("trl_replay-*.whl")
    (plugin,) = tmp_path.glob("trl_replay_freshness-*.whl")
    return core, plugin


def test_the_wheels_hold_their_package_and_nothing_else(wheels):
    for wheel, package in zip(wheels, ("trl_replay", "trl_replay_freshness"), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        assert {name.split("/")[0] for name in names} == {package, f"{package}-0.1.0.dist-info"}
        assert f"{package}/py.typed" in names
        assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
        assert "License-Expression: Apache-2.0" in metadata
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_replay").rglob("*.py")}
    with zipfile.ZipFile(wheels[0]) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == sources
        assert "trl_replay/.agents/skills/trl-replay/SKILL.md" in archive.namelist()
