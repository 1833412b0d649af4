"""Tests with Unsloth itself, which `make unsloth` installs beside `.venv`: elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("unsloth") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import real_unsloth  # noqa: F401  # before anything imports trl
