"""One torch thread and no network, as in trl_replay's own tests; and the plugins, installed or not."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

import trl_replay
from trl_replay.registry import registry

torch.set_num_threads(1)

if importlib.util.find_spec("trl_replay_curricula") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))


@pytest.fixture(scope="session", autouse=True)
def plugins() -> Iterator[None]:
    """Registers in this process what no entry point has brought."""
    import trl_replay_curricula

    names = [name for name in ("skip_solved", "greso", "bapo") if name not in registry().plugins]
    for name in names:
        trl_replay.register(getattr(trl_replay_curricula, name), name)
    yield
    for name in names:
        trl_replay.unregister(name)
