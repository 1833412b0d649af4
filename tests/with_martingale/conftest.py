"""Tests with Martingale, which `make martingale` installs beside `.venv`: elsewhere they are not collected."""

from importlib.util import find_spec

if find_spec("martingale") is None:
    collect_ignore_glob = ["test_*.py"]
