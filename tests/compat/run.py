"""Runs the seam tests on every TRL release of the table, each in a throw-away environment: `make compat`.

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
    "1.5.1": ("requests",),
    "1.8.0": ("requests",),
    "1.9.2": ("requests",),
    "1.13.0": ("requests",),
    "1.14.2": (),
    "1.15.0": ("triton",),  # its loss has no other path; PyTorch for the CPU comes without
    "1.16.0": (),
}
TESTS = tuple(f"tests/test_{name}.py" for name in ("idle", "known_bugs", "attach", "batch", "canary", "liger"))


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
        counts = dict(re.findall(r"(\d+) (passed|failed|error|skipped)", result.stdout)[::-1])
        failures += result.returncode != 0
        words = ", ".join(f"{number} {what}" for number, what in counts.items()) or "no test ran"
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
    return python


def run_tests(python: Path) -> subprocess.CompletedProcess[str]:
    """One pytest run; -P, so that the wheel is imported and not the working tree."""
    deselected = ["-k", "not any_strategies_mix"]  # strategies see columns, never TRL
    command = [str(python), "-P", "-m", "pytest", "-p", "no:cacheprovider", *deselected, *TESTS]
    variables = {**os.environ, "TRITON_INTERPRET": "1"}  # Triton's kernels run on the CPU
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def pip(*arguments: str) -> None:
    """Runs this Python's pip, silent unless it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
