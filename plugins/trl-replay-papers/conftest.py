"""One torch thread and no network, as in trl_replay's own tests; and the plugins, installed or not."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

import trl_replay
from trl_replay.registry import registry

torch.set_num_threads(1)

if importlib.util.find_spec("trl_replay_papers") is None:
    sys.path.insert(0, str(Path(__file__).parent / "src"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Does what tests/conftest.py does for launches of several processes, where these tests run without it."""
    forked = sys.modules.get("forked")
    if forked is not None and forked._nursery is None:
        forked.prepare()


def plugin_object(name: str) -> Any:
    """The object that an entry point names: its module, or the instance of its name in there."""
    module = importlib.import_module(f"trl_replay_papers.{'corrections' if name == 'papers' else name}")
    return getattr(module, name, module)


@pytest.fixture(scope="session", autouse=True)
def plugins() -> Iterator[None]:
    """Registers in this process what no entry point has brought."""
    from trl_replay_papers import METHODS

    names = [name for name in (*METHODS, "papers") if name not in registry().plugins]
    for name in names:
        trl_replay.register(plugin_object(name), name)
    yield
    for name in names:
        trl_replay.unregister(name)
