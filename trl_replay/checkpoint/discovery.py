"""Which of a run's checkpoints is the newest whole one. Imports neither torch nor trl."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

TRAINER_STATE = "trainer_state.json"
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
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[-1].isdecimal()]
    newest_first = sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True)
    return next((str(path) for path in newest_first if _is_whole(path)), None)


def _is_whole(folder: Path) -> bool:
    """Whether stock's last file is there, all files that ours know of are, and every file has its end."""
    if not (folder / TRAINER_STATE).is_file() or (folder / UNFINISHED).exists():
        return False
    ours = list((folder / "trl_replay").glob("rank-*"))
    return all(map(_has_all_files, ours)) and all(_has_its_end(path) for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    """All files in a checkpoint, and in its folders, which may be links."""
    inside = [path for part in folder.iterdir() if part.is_dir() for path in part.rglob("*")]
    return [path for path in (*folder.iterdir(), *inside) if path.is_file()]


def _has_all_files(rank: Path) -> bool:
    """Whether the files of one rank are there: ours, and those that the trainer writes for it besides."""
    try:
        content = json.loads((rank / "state.json").read_bytes())["content"]
        return all((rank / name).is_file() for name in content["files"]) and all(
            (rank.parents[1] / name).is_file() for name in content["beside"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, path.stat().st_size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return path.stat().st_size == 8 + length + max(ends, default=0)
