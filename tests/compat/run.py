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
import time
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
FILES = ("attach", "canary", "every_batch", "every_model", "every_source", "every_trainer", "idle", "images",
         "image_layouts", "known_bugs", "liger")  # fmt: skip
TESTS = (
    *(f"tests/test_{name}.py" for name in FILES),
    "tests/test_checkpoint.py::test_it_is_so_in_a_later_epoch_without_shuffling_and_in_the_first_with_it",
    "tests/test_checkpoint.py::test_the_buffer_is_rotated_with_the_checkpoint",
    "tests/test_hooks.py::test_a_key_that_a_plugin_declares_travels_with_its_group",
)
LEFT_OUT = (
    "any_strategies_mix",  # strategies see columns, never TRL
    "test_12_",  # the buffer's bytes after a hundred replays
    "test_34_",  # an evictor's order
    "every_layout_replays",  # test_every_batch does the same, with the loss by hand
)


def main() -> int:
    """Prints a table release × result, as Markdown; 0 if all are green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), help="TRL releases; all of the table if none")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that are there")
    options = parser.parse_args()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    wheel = build()
    lines, failures = [], 0
    for release in options.releases:
        python = make_environment(release, wheel)
        started = time.perf_counter()
        result = run_tests(python)
        (ENVIRONMENTS / f"{release}.log").write_text(result.stdout + result.stderr)
        summary = result.stdout.strip().rpartition("\n")[2]
        counts = re.findall(r"\d+ (?:passed|failed|error|skipped)", summary)
        failures += result.returncode != 0
        words = ", ".join(counts) or "no test ran"
        verdict = "green" if result.returncode == 0 else "RED"
        lines.append(f"| {release} | {verdict} | {words} | {time.perf_counter() - started:.0f} s |")
        print(lines[-1], flush=True)
        if result.returncode:
            print(result.stdout[-6000:], result.stderr[-2000:], file=sys.stderr)
        if not options.keep:
            shutil.rmtree(python.parents[1])
    print("\n| TRL | result | tests | time |\n|---|---|---|---|", *lines, sep="\n")
    return 1 if failures else 0


def build() -> Path:
    """The wheel of this package, the same one for all releases."""
    shutil.rmtree(ENVIRONMENTS / "wheel", ignore_errors=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(ENVIRONMENTS / "wheel"), str(ROOT))
    (wheel,) = (ENVIRONMENTS / "wheel").glob("*.whl")
    return wheel


def make_environment(release: str, wheel: Path) -> Path:
    """The Python of an environment with this TRL release and `wheel`."""
    path = ENVIRONMENTS / release
    python = path / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(path)}))
    if not python.exists():
        venv.create(path, with_pip=False)
        (site / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        pip("install", "--no-deps", "--target", str(site), f"trl=={release}")
        if RELEASES.get(release):
            pip("install", "--target", str(site), *RELEASES[release])
    pip("install", "--no-deps", "--upgrade", "--target", str(site), str(wheel))
    check_environment(python, release, site)
    return python


def check_environment(python: Path, release: str, site: Path) -> None:
    """The environment imports its own TRL and the wheel, not what it borrows from or the working tree."""
    code = "import trl, trl_replay; print(trl.__version__, trl.__file__, trl_replay.__file__)"
    found = execute(python, "-c", code)
    expected = f"{release} {site / 'trl' / '__init__.py'} {site / 'trl_replay' / '__init__.py'}"
    if found.stdout.strip() != expected:
        raise SystemExit(f"The environment imports {found.stdout} instead of {expected}\n{found.stderr}")


def run_tests(python: Path) -> subprocess.CompletedProcess[str]:
    """One pytest run."""
    return execute(python, "-m", "pytest", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})", *TESTS)


def execute(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an environment's Python; the wheel is imported and not the working tree."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU
    command = [str(python), "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def pip(*arguments: str) -> None:
    """Runs this Python's pip, silent unless it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
