"""A session's own random numbers: no draw touches a global generator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


class Generators:
    """Two private generators.

    Attributes:
        shared (`numpy.random.Generator`): In the same state on all processes that share the buffer.
        local (`numpy.random.Generator`): This process's own, drawn from as often as its rows need.
    """

    def __init__(self, seed: int = 0) -> None:
        self.shared = np.random.default_rng(seed)
        self.local = self.shared.spawn(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"shared": self.shared.bit_generator.state, "local": self.local.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any], shared: bool = True, local: bool = True) -> None:
        """Take what `state_dict` gave of those that are named."""
        if shared:
            self.shared.bit_generator.state = state["shared"]
        if local:
            self.local.bit_generator.state = state["local"]


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the global random generators after others' code has run."""
    import torch

    of_numpy = np.random.get_state()
    of_python = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
