"""The identity of one saving: ours and the trainer's own files carry it, so that neither is taken for the other's.

Another run that trains without replay in the same folder writes over the trainer's files, and leaves ours behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.files import regular

TRAINER_STATE = "trainer_state.json"
FOLDER = "trl_replay"
"""Our part of a checkpoint; and where its identity stands among the states of callbacks in `TRAINER_STATE`."""


@dataclass(frozen=True, slots=True)
class SaveId:
    """The trainer's record of our part of its checkpoint.

    Attributes:
        save_id (`str`): Random; the same on all ranks.
        update (`int`): `global_step` of the checkpoint. A run without replay keeps what it was resumed with.
        folders (`Sequence[str]`): Ranks' folders that lie on the same disk.
    """

    save_id: str
    update: int
    folders: Sequence[str]


def put_save_id(state: Any, save_id: str, folders: Sequence[str]) -> None:
    """Have the trainer save an identity with its `state`."""
    told = SaveId(save_id, state.global_step, folders)
    state.stateful_callbacks[FOLDER] = {"args": {}, "attributes": asdict(told)}


def read_save_id(checkpoint: Path) -> SaveId | None:
    """The identity in a checkpoint's trainer state; None where it was saved without replay, or can't be read."""
    try:
        state = json.loads(regular(checkpoint / TRAINER_STATE).read_bytes())
        told = SaveId(**state["stateful_callbacks"][FOLDER]["attributes"])
        named = all(isinstance(name, str) for name in told.folders)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return told if named and told.update == state.get("global_step") else None
