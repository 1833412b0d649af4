"""Trains and replays on every TRL release of the table, each in a throw-away environment: `make compat`.

What runs are the tests that depend on TRL: the seam's and those of every kind of batch, model, source and trainer.
An environment has a TRL and this package's wheel of its own, and borrows everything else (torch, transformers, …) from
the Python that runs this script.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "out" / "compat"
RELEASES: dict[str, tuple[str, ...]] = {  # what a release imports without declaring it stands beside it
    "1.5.1": ("requests", "jmespath"),  # jmespath: for tools
    "1.8.0": ("requests", "jmespath"),
    "1.9.2": ("requests", "jmespath"),
    "1.13.0": ("requests",),
    "1.14.2": (),
    "1.15.0": ("triton",),  # its loss has no other path; PyTorch for the CPU comes without
    "1.16.0": (),
}
FILES = ("any_settings", "assembly", "attachment", "completion_sources", "dead_groups", "fresh_metrics",
         "generation_prompts", "generation_rounds", "idle", "images", "loss_class",
         "losses_by_hand", "mixing", "models", "plan_hook", "replay_iterations", "replay_reward",
         "replayed_groups", "session", "silent_rows", "subclasses", "users_losses")  # fmt: skip


def paths_of(name: str) -> list[str]:
    """The test files of this name, relative to the project's root."""
    found = sorted((ROOT / "tests").glob(f"[!w]*/test_{name}.py"))  # with_vllm and with_unsloth have their own
    assert found, f"there is no tests/*/test_{name}.py"
    return [str(path.relative_to(ROOT)) for path in found]


TESTS = (
    *(path for name in FILES for path in paths_of(name)),
    "tests/checkpoint/test_saving.py::test_the_buffer_is_rotated_with_the_checkpoint",
    "tests/trainer/test_hooks.py::test_a_key_that_a_plugin_declares_travels_with_its_group",
)


def main() -> int:
    """Prints a table release × result, as Markdown; 0 if all are green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), help="TRL releases; all of the table if none")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that are there")
    options = parser.parse_args()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    wheels = build()
    lines, failures = [], 0
    for release in options.releases:
        python = make_environment(release, wheels)
        before = processor_seconds()
        result = run_tests(python)
        (ENVIRONMENTS / f"{release}.log").write_text(result.stdout + result.stderr)
        summary = result.stdout.strip().rpartition("\n")[2]
        counts = re.findall(r"\d+ (?:passed|failed|error|skipped)", summary)
        failures += result.returncode != 0
        words = ", ".join(counts) or "no test ran"
        verdict = "green" if result.returncode == 0 else "RED"
        lines.append(f"| {release} | {verdict} | {words} | {processor_seconds() - before:.0f} s |")
        print(lines[-1], flush=True)
        if result.returncode:
            print(result.stdout[-6000:], result.stderr[-2000:], file=sys.stderr)
        if not options.keep:
            shutil.rmtree(python.parents[1])
    print("\n| TRL | result | tests | processor time |\n|---|---|---|---|", *lines, sep="\n")
    return 1 if failures else 0


def build() -> list[Path]:
    """The wheels of this package and of the plugins beside it, the same ones for all releases: what is borrowed has
    their entry points, but not themselves."""
    folder = ENVIRONMENTS / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    sources = [str(ROOT), *map(str, sorted((ROOT / "plugins").glob("trl-replay-*")))]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *sources)
    return list(folder.glob("*.whl"))


def make_environment(release: str, wheels: list[Path]) -> Path:
    """The Python of an environment with this TRL release and `wheels`."""
    python = fresh_environment(ENVIRONMENTS / release, release)
    site = packages(python)
    pip("install", "--no-deps", "--upgrade", "--target", str(site), *map(str, wheels))
    check_environment(python, release, site)
    return python


def fresh_environment(path: Path, release: str) -> Path:
    """The Python of an environment with this TRL release, made if it is not there; without this package."""
    python = path / "bin" / "python"
    site = packages(python)
    if not python.exists():
        venv.create(path, with_pip=False)
        borrowed = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (site / "borrowed.pth").write_text("\n".join(borrowed))  # the folders, but no editable installs in them
        pip("install", "--no-deps", "--target", str(site), f"trl=={release}")
        if RELEASES.get(release):
            pip("install", "--target", str(site), *RELEASES[release])
    return python


def packages(python: Path) -> Path:
    """The folder of an environment's packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])}))


def check_environment(python: Path, release: str, site: Path) -> None:
    """The environment imports its own TRL and the wheel, not what it borrows from or the working tree."""
    names = ("trl", "trl_replay", "trl_replay_curricula", "trl_replay_freshness", "trl_replay_papers")
    files = ", ".join(f"{name}.__file__" for name in names)
    found = execute(python, "-c", f"import {', '.join(names)}; print(trl.__version__, {files})")
    expected = " ".join([release, *(str(site / name / "__init__.py") for name in names)])
    if found.stdout.strip() != expected:
        raise SystemExit(f"The environment imports {found.stdout} instead of {expected}\n{found.stderr}")


def run_tests(python: Path) -> subprocess.CompletedProcess[str]:
    """One pytest run."""
    return execute(python, "-m", "pytest", "-p", "no:cacheprovider", *TESTS)


def execute(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an environment's Python; the wheel is imported and not the working tree."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU
    variables["TRL_REPLAY_ALL_LOSSES"] = "1"
    command = [str(python), "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def processor_seconds() -> float:
    """CPU seconds of all processes that have ended since the start."""
    times = os.times()
    return times.children_user + times.children_system


def pip(*arguments: str) -> None:
    """Runs this Python's pip, silent unless it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
