"""Set-up for all tests: one torch thread, no network, and rewards that make exactly the groups a test wants."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_garbage_collection() -> Iterator[None]:
    """A trainer collects garbage when training ends; what the imports left need not be walked each time."""
    import trl  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
