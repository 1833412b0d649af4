"""Which checkpoints of a folder are whole, and of which save. Imports no torch."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.files import named_in, regular

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


NAME = re.compile(r"checkpoint-([0-9]+)")
"""Name that the trainer gives a checkpoint, with its step."""
KINDS = (".json", ".pt", ".pth", ".safetensors")
"""Endings of files that show their length."""
UNFINISHED = "checkpoint-is-incomplete.txt"
"""Stands in a checkpoint as long as the trainer writes it on SIGTERM (`enable_jit_checkpoint`)."""


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was written to its end.

    Transformers' own `resume_from_checkpoint=True` goes by folder names, and fails on a folder that a killed run left
    half-written.

    Args:
        output_dir (`str` or `Path`): The trainer's.

    Returns:
        The folder for `trainer.train(resume_from_checkpoint=…)`; None if there is none, which starts anew.

    Example:
        ```python
        trainer.train(resume_from_checkpoint=trl_replay.last_complete_checkpoint(trainer.args.output_dir))
        ```
    """
    while True:
        folders = numbered_checkpoints(output_dir)
        for folder in reversed(folders):
            if _is_complete(folder):
                return str(folder)
        if numbered_checkpoints(output_dir) == folders:  # else a run has saved and rotated in the meantime
            return None


def numbered_checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders of a run's checkpoints, by step. Copies under other names, like `checkpoint-best-12`, are none."""
    found = {path: NAME.fullmatch(path.name) for path in Path(output_dir).glob("checkpoint-*")}
    steps = {path: int(match[1]) for path, match in found.items() if match}
    return sorted(steps, key=lambda path: steps[path])


def _is_complete(folder: Path) -> bool:
    """Tell whether the trainer's last file is there, all files that ours know of are, and every file has its end."""
    if not (folder / TRAINER_STATE).is_file() or (folder / UNFINISHED).exists():
        return False
    saved = read_save_id(folder)
    left_behind = saved is None  # ours, if any, are then another run's
    paths = [path for path in folder.rglob("*") if not (left_behind and FOLDER in path.parts)]
    return _has_all_ranks(folder, saved) and all(map(_has_its_end, paths))


def _has_its_end(path: Path) -> bool:
    """Tell whether a file of a kind that shows its length was written to the end; a job that is preempted may leave
    others' files short on a network's disk."""
    from safetensors import SafetensorError, safe_open

    if path.suffix not in KINDS:
        return True
    try:
        regular(path)
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return True
        if path.suffix == ".safetensors":
            with safe_open(path, "np"):
                return True
        return zipfile.is_zipfile(path)  # its directory comes last
    except (OSError, ValueError, RecursionError, SafetensorError):
        return False


def _has_all_ranks(folder: Path, saved: SaveId | None) -> bool:
    """Tell whether our part of a checkpoint is whole, if it has one: what another run left behind is none."""
    ours = folder / FOLDER
    if saved is None:
        return True
    if not ours.is_dir():
        return not saved.folders
    named = {ours / name for name in saved.folders}
    present = set(ours.glob("rank-*"))
    if not present or (named & present and named - present):  # none of those named: another machine's disk
        return False
    return all(_has_all_files(rank) for rank in present)


def _has_all_files(rank: Path) -> bool:
    """Tell whether the files of one rank are there: ours, and those that the trainer writes for it besides."""
    checkpoint = rank.parents[1]
    try:
        content = json.loads(regular(rank / "state.json").read_bytes())["content"]
        paths = [named_in(rank, name) for name in content["files"]]
        paths.append(named_in(rank.parent, content["table"][0]) / "table.safetensors")
        paths += [named_in(checkpoint, name) for name in content["beside"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return all(path.is_file() for path in paths)
