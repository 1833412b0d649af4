"""Which of a run's checkpoints is the newest whole one. Imports neither torch nor trl."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from .save_id import TRAINER_STATE

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
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if _number(path).isdecimal()]
    newest_first = sorted(folders, key=lambda path: int(_number(path)), reverse=True)
    for folder in newest_first:
        if _is_complete(folder):
            return str(folder)
    return None


def _number(folder: Path) -> str:
    """What stands at the end of a checkpoint's name."""
    return folder.name.rpartition("-")[2]


def _is_complete(folder: Path) -> bool:
    """Whether stock's last file is there, all files that ours know of are, and every file has its end."""
    if not (folder / TRAINER_STATE).is_file() or (folder / UNFINISHED).exists():
        return False
    ours = (folder / "trl_replay").glob("rank-*")
    if not all(_has_all_files(rank) for rank in ours):
        return False
    return all(_has_its_end(path) for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    """All files in a checkpoint, and in its folders, which may be links."""
    paths = list(folder.iterdir())
    for part in folder.iterdir():
        if part.is_dir():
            paths += part.rglob("*")
    return [path for path in paths if path.is_file()]


def _has_all_files(rank: Path) -> bool:
    """Whether the files of one rank are there: ours, and those that the trainer writes for it besides."""
    checkpoint = rank.parents[1]
    try:
        content = json.loads((rank / "state.json").read_bytes())["content"]
        paths = [rank / name for name in content["files"]]
        paths += [checkpoint / name for name in content["beside"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(path.is_file() for path in paths)


def _has_its_end(path: Path) -> bool:
    """Whether a file of a kind that tells its length was written to the end; other kinds are taken as they are."""
    if path.suffix == ".json":
        return _parses(path)
    if path.suffix in (".pt", ".pth"):
        return zipfile.is_zipfile(path)  # the directory of a zip file comes last
    if path.suffix == ".safetensors":
        return _has_all_tensors(path)
    return True


def _parses(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _has_all_tensors(path: Path) -> bool:
    """Whether the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(header_length, size)))
            header.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return size == 8 + header_length + max(ends, default=0)
