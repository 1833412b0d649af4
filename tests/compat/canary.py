"""Runs the drift canary over the source of every TRL release in range, or of those named: `make canary`.

A release outside the range says in words what changed: `python tests/compat/canary.py 0.29.0`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from drift import drift

from trl_replay import compat


def main() -> int:
    """Prints a line a release; 0 if none in range has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="TRL releases; all in range if none")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use and to download to")
    options = parser.parse_args()
    drifted = 0
    with tempfile.TemporaryDirectory() as scratch:
        wheels = options.wheels or Path(scratch) / "wheels"
        for release in options.releases or in_range():
            found = drift(source(release, wheels, Path(scratch)))
            drifted += bool(found) and compat.TESTED.contains(release)
            print(f"{release}: {'; '.join(found) or 'as the seam relies on'}", flush=True)
    return 1 if drifted else 0


def in_range() -> list[str]:
    """All released versions in `compat.TESTED`, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "trl"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, _, listed = printed.partition("Available versions: ")
    releases = listed.partition("\n")[0].split(", ")
    return sorted((release for release in releases if compat.TESTED.contains(release)), key=Version)


def source(release: str, wheels: Path, scratch: Path) -> Path:
    """The unpacked `trl` folder of a release."""
    name = f"trl-{release}-py3-none-any.whl"
    if not (wheels / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*command, f"trl=={release}"], check=True)
    with zipfile.ZipFile(wheels / name) as wheel:
        wheel.extractall(scratch / release)
    return scratch / release / "trl"


if __name__ == "__main__":
    sys.exit(main())
