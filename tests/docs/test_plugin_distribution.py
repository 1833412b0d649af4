"""The plugin as users get it: wheels of core and plugin in a throw-away environment, trained in subprocesses.

These are forks of one process of that environment, which has imported TRL and nothing of ours: that takes six seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "trl-replay-freshness"

SCRIPT = textwrap.dedent("""
    import gc
    gc.disable()  # importing leaves little garbage, and looking for it takes more than a second
    import hashlib, importlib, json, os, sys
    import torch
    torch.set_num_threads(1)
    from trl import GRPOTrainer

    def run(directory, **settings):
        import trl_replay
        from trl_replay.testing import make_trainer

        completed = []
        def reward(completions, **kwargs):
            completed.extend(completions)
            return [float(row % 2) if row < 4 else 0.0 for row in range(len(completions))]
        trainer = make_trainer(directory, reward)
        session = trl_replay.attach(trainer, **settings)
        trainer.train()
        digest = hashlib.sha256()
        for name, weight in sorted(trainer.model.state_dict().items()):
            digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
        return {
            "weights": digest.hexdigest(),
            "completions": completed,
            "replaced": session.metrics["replay/replaced_fraction"],
            "plugins": session.plugins,
        }

    def report(directory, *samplers):
        importlib.invalidate_caches()  # a wheel may have been installed since
        import trl_replay
        from trl_replay.registry import registry

        runs = [run(directory, replay_sampler=name) for name in samplers]
        plugins = {
            name: [plugin.distribution, getattr(plugin.object, "__file__", "")]
            for name, plugin in registry().plugins.items()
        }
        return {"core": trl_replay.__file__, "runs": runs, "plugins": plugins}

    for line in sys.stdin:
        assert not [name for name in sys.modules if name.startswith("trl_replay")]
        process = os.fork()
        if process == 0:
            print("REPORT" + json.dumps(report(*json.loads(line))), flush=True)
            os._exit(0)
        if os.waitpid(process, 0)[1]:
            sys.exit("a training failed")
    gc.freeze()  # or the process takes another second to end
""")


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

    def __init__(self, folder: Path) -> None:
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
        self.trainer = None

    def install(self, wheel: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile")
        python(*pip, "--target", self.site, wheel)

    def train(self, *samplers: str) -> dict:
        """Trains once with each sampler, outside of the repository."""
        if self.trainer is None:
            script = self.folder / "train.py"
            script.write_text(SCRIPT)
            command = [str(self.executable), "-W", "error::RuntimeWarning", str(script)]
            self.trainer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean(), cwd=self.folder
            )
        print(json.dumps([str(self.folder / "run"), *samplers]), file=self.trainer.stdin, flush=True)
        for line in self.trainer.stdout:
            if line.startswith("REPORT"):
                return json.loads(line.removeprefix("REPORT"))
        raise AssertionError("the training failed: see what it wrote to stderr")

    def close(self) -> None:
        if self.trainer is not None:
            with self.trainer:
                self.trainer.stdin.close()


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """An environment with the wheel of the core."""
    made = Environment(tmp_path_factory.mktemp("installed") / "environment")
    made.install(wheels[0])
    yield made
    made.close()


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
    found = (path for path in (ROOT / "examples").rglob("*.*") if path.suffix in (".py", ".yaml"))
    examples = {f"trl_replay/{path.relative_to(ROOT).as_posix()}" for path in found}
    with zipfile.ZipFile(wheels[0]) as archive:
        assert {name for name in archive.namelist() if name.endswith((".py", ".yaml"))} == sources | examples


def test_the_installed_package_has_its_examples_and_its_hook(environment, tmp_path):
    """A copied example, less its line that attaches, replays under `trl-replay run`."""
    command = (environment.executable, "-m", "trl_replay")
    python(*command, "example", "warm_start", "--out", tmp_path, cwd=tmp_path)
    above, attaching, _ = (tmp_path / "warm_start.py").read_text().partition("    session = trl_replay.attach(")
    assert attaching
    (tmp_path / "unattached.py").write_text(f"{above}    trainer.train()\n\n\nmain()\n")
    printed = python(*command, "run", "--", environment.executable, "unattached.py", cwd=tmp_path)
    assert "replay: 30 generation batches" in printed


def test_the_installed_plugin_trains_and_changes_nothing_where_it_is_not_named(wheels, environment):
    without = environment.train("proportional")
    environment.install(wheels[1])
    beside = environment.train("proportional", "freshness/half_life")

    for report in (without, beside):
        assert Path(report["core"]).is_relative_to(environment.site), "the wheel and not the checkout must be in use"
    assert list(without["plugins"]) == ["builtin"]
    distribution, module = beside["plugins"]["freshness"]
    assert distribution == "trl-replay-freshness 0.1.0"
    assert Path(module).is_relative_to(environment.site)

    stock, idle, named = *without["runs"], *beside["runs"]
    assert stock["replaced"] > 0, "the runs that are compared must replay"
    assert idle == stock, "installed but not named, and yet the run is another"
    assert named["plugins"] == ["freshness"]
    assert named["replaced"] > 0
