"""Scopes: which processes share a buffer, behind four verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Agreement, Floats, Group, Storage

ERROR_BYTES = 512


class ProcessScope:
    """Each process keeps its own groups. The only communication is one small all-gather per generation batch."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def share(self, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """This process's candidates only."""
        return columns

    def admit(self, storage: Storage, groups: Mapping[int, Group]) -> None:
        """Keeps this process's payload here."""
        for serial, group in groups.items():
            storage.put(serial, group)

    def fetch(self, storage: Storage, serials: Sequence[int]) -> list[Group]:
        """Payload from this process's storage."""
        return [storage.get(serial) for serial in serials]

    def agree(self, vector: Floats, error: str) -> Agreement:
        """Gathers every rank's vector and error text in one fixed-width all-gather of bytes."""
        if self.accelerator.num_processes == 1:
            return Agreement(vector[None], [error])
        import torch

        text = error.encode()[:ERROR_BYTES].ljust(ERROR_BYTES, b"\0")
        packed = np.frombuffer(vector.astype(np.float64).tobytes() + text, dtype=np.uint8)
        mine = torch.from_numpy(packed.copy()).to(self.accelerator.device)
        everyone = self.accelerator.gather(mine[None]).cpu().numpy()
        vectors = np.ascontiguousarray(everyone[:, :-ERROR_BYTES]).view(np.float64)
        errors = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone[:, -ERROR_BYTES:]]
        return Agreement(vectors, errors)
