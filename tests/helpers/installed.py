"""What a package manager leaves of a distribution with one entry point of `trl_replay`."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, distribution: str, entry_point: str, version: str = "1.0") -> None:
    """Puts a distribution's metadata into a folder; `entry_point` is `name = module:attribute`."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[trl_replay]\n{entry_point}\n")
