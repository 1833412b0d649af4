"""Around the trainer's own saving and loading of checkpoints: every process together, ours before stock's."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from . import checkpoint
from .compat import checkpoint_folder
from .errors import CheckpointError, ReplayError
from .saved import FOLDER, Saved
from .session import Session
from .whole import TRAINER_STATE

MISSING = "no buffer"


def save(session: Session, trainer: Any, stock: Callable[..., Any], model: Any, trial: Any, **kwargs: Any) -> Any:
    """Writes our part of a checkpoint on every process, and only then lets stock write its own.

    Stock writes `trainer_state.json` last: where it is, all of ours is. Of a folder that is written again it goes
    first.
    """
    folder = checkpoint_folder(trainer, trial)

    def make_room() -> None:
        if trainer.args.should_save:
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)

    _together(make_room)
    _together(lambda: checkpoint.write(session, folder / FOLDER))
    return stock(model, trial, **kwargs)


def load(session: Session, trainer: Any, stock: Callable[..., Any], path: str | None) -> Any:
    """Lets stock restore its part, and then puts the session where it was.

    Raises:
        MismatchError: The checkpoint is of another run, and `replay_on_mismatch` is `"refuse"`.
        CheckpointError: Its replay files are damaged, and `replay_on_mismatch` is `"refuse"`.
    """
    result = stock(path)
    if path is None:
        return result
    folder = Path(path) / FOLDER
    states: list[Saved] = []
    error: ReplayError | None = None
    try:
        if folder.is_dir():
            states = checkpoint.read(session, folder)
    except CheckpointError as caught:
        error = caught
    told = gather_object([str(error or "") if folder.is_dir() else MISSING])
    if all(text == MISSING for text in told):
        warnings.warn(f"{path} holds no replay buffer: training resumes with an empty one.", stacklevel=2)
        checkpoint.empty(session)
    elif not any(told):
        _together(lambda: checkpoint.apply(session, states, folder))
    elif session.config.replay_on_mismatch == "refuse":
        raise error or CheckpointError(_by_rank(told))
    else:
        warnings.warn(f"Training resumes with an empty replay buffer. {_by_rank(told)}", stacklevel=2)
        checkpoint.empty(session)
    return result


def _together(action: Callable[[], None]) -> None:
    """Runs `action` on every process and waits for all; where it fails on one, it raises on all."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    told = gather_object([f"{type(error).__name__}: {error}" if error else ""])
    if isinstance(error, ReplayError):
        raise error
    if any(told):
        raise CheckpointError(_by_rank(told)) from error


def _by_rank(told: list[str]) -> str:
    if len(told) == 1:
        return told[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
