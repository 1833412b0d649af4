"""The wheels of core and plugin as users get them, and the core's in a throw-away environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from started import QUICK

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "trl-replay-freshness"
UNATTACHED = """
from trl_replay.testing import make_trainer


def starts_with_a_digit(completions, **_):
    return [float(text[:1].isdigit()) for text in completions]


make_trainer("out", starts_with_a_digit, max_steps=10).train()
"""


def clean():
    """The environment of a Python with nothing of this process's path, and no network for pip."""
    names = ("PATH", "HOME", "TMPDIR", "SYSTEMROOT")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return environment


def python(*arguments, **options):
    done = subprocess.run([str(part) for part in arguments], capture_output=True, text=True, env=clean(), **options)
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of both distributions: `(core, plugin)`."""
    folder = tmp_path_factory.mktemp("wheels")
    python(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, PLUGIN)
    (core,) = folder.glob("trl_replay-*.whl")
    (plugin,) = folder.glob("trl_replay_freshness-*.whl")
    return core, plugin


class Environment:
    """A virtual environment without pip that sees everything installed here but our own two distributions."""

    def __init__(self, folder):
        self.folder = folder
        python(sys.executable, "-m", "venv", "--without-pip", folder)
        scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        self.executable = scripts / "python"
        self.site = Path(
            python(self.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        )
        others = folder / "others"
        others.mkdir()
        for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(installed).iterdir():
                if "trl_replay" not in entry.name and not (others / entry.name).exists():
                    (others / entry.name).symlink_to(entry)
        (self.site / "others.pth").write_text(str(others))
        shutil.copytree(QUICK, self.site, dirs_exist_ok=True)

    def install(self, wheel):
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile")
        python(*pip, "--target", self.site, wheel)


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """An environment with the wheel of the core."""
    made = Environment(tmp_path_factory.mktemp("installed") / "environment")
    made.install(wheels[0])
    return made


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


def test_the_installed_package_has_its_hook(environment, tmp_path):
    """A script that does not attach replays under `trl-replay run`."""
    (tmp_path / "unattached.py").write_text(UNATTACHED)
    printed = python(environment.executable, "-m", "trl_replay", "run", "unattached.py", cwd=tmp_path)
    assert "replay: 25 of 64 groups, 2 of 30 replaced" in printed
