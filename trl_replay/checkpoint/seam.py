"""Around the trainer's own saving and loading of checkpoints: every process together, ours before stock's."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ..compat import checkpoint_folder
from ..distributed.all_ranks import join_errors, run_on_all_ranks
from ..errors import CheckpointError, ReplayError, SeamError
from ..session import Session
from . import session_state as checkpoint
from .discovery import TRAINER_STATE
from .format import FOLDER, RankState

MISSING = "no buffer"


def save(
    session: Session,
    trainer: Any,
    stock: Callable[..., Any],
    model: Any,
    trial: Any,
    **kwargs: Any,
) -> Any:
    """Writes our part of a checkpoint on every process, and only then lets stock write its own.

    Stock writes `trainer_state.json` last: where it is, all of ours is. Of a folder that is written again it goes
    first.
    """
    folder = checkpoint_folder(trainer, trial)

    def make_room() -> None:
        if trainer.args.should_save:
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            if (folder / FOLDER).is_symlink():
                (folder / FOLDER).unlink()
            elif (folder / FOLDER).exists():
                shutil.rmtree(folder / FOLDER)

    session.roll_call("checkpoint", "a checkpoint")
    detached = gather_object([session.detached])
    if all(detached):
        return stock(model, trial, **kwargs)
    if any(detached):
        raise SeamError("Replay is detached on some processes only: detach on all, after the same update.")
    run_on_all_ranks(make_room, CheckpointError)
    run_on_all_ranks(lambda: checkpoint.write(session, folder / FOLDER), CheckpointError)
    return stock(model, trial, **kwargs)


def load(session: Session, trainer: Any, stock: Callable[..., Any], path: str | None) -> Any:
    """Lets stock restore its part, and then puts the session where it was.

    Raises:
        MismatchError: The checkpoint is of another run, and `replay_on_mismatch` is `"refuse"`.
        CheckpointError: Its replay files are damaged, and `replay_on_mismatch` is `"refuse"`.
    """
    result = stock(path)
    if path is None or session.detached:
        return result
    session.roll_call("resume", "resuming from a checkpoint")
    folder = Path(path) / FOLDER
    states: list[RankState] = []
    error: ReplayError | None = None
    try:
        if folder.is_dir():
            states = checkpoint.read(session, folder)
    except CheckpointError as caught:
        error = caught
    told = gather_object([str(error or "") if folder.is_dir() else MISSING])
    if all(text == MISSING for text in told):
        warnings.warn(
            f"{path} holds no replay buffer: training resumes with an empty one.",
            stacklevel=2,
        )
        checkpoint.empty(session)
    elif not any(told):
        run_on_all_ranks(lambda: checkpoint.apply(session, states, folder), CheckpointError)
        checkpoint.withdraw_unrestored(session, gather_object([session.buffer.unrestored]))
    elif session.config.replay_on_mismatch == "refuse":
        raise error or CheckpointError(join_errors(told))
    else:
        warnings.warn(
            f"Training resumes with an empty replay buffer. {join_errors(told)}",
            stacklevel=2,
        )
        checkpoint.empty(session)
    return result
