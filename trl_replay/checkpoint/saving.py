"""Around the trainer's own saving and loading of checkpoints: every process together, ours before stock's."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ..compat import checkpoint_folder
from ..distributed.agreement import run_on_all_ranks
from ..errors import CheckpointError, ReplayError, SeamError
from ..protocols import AttachedSession
from .discovery import FOLDER, TRAINER_STATE, numbered_checkpoints, put_save_id
from .format import RankState, rank_folder, scope_in
from .session_state import RankPart

REMEDY = "To go on with an empty buffer, set replay_on_mismatch='empty'."


def save(
    session: AttachedSession, trainer: Any, stock: Callable[..., Any], model: Any, trial: Any, **kwargs: Any
) -> Any:
    """Write our part of a checkpoint on every process, and only then lets stock write its own.

    Stock writes `trainer_state.json` last: where it is, all of ours is. Of a folder that is written again it goes
    first.

    Raises:
        CheckpointError: A process can't write its part.
        SeamError: Not all processes write, replay is detached on some of them, or something has failed on one.
    """
    session.roll_call("checkpoint", "a checkpoint")
    run_on_all_ranks(session.components.errors.raise_kept, SeamError)  # ranks may differ since
    told = gather_object([(session.detached, uuid.uuid4().hex)])
    detached = [is_detached for is_detached, _ in told]
    save_id = told[0][1]
    if all(detached):
        return stock(model, trial, **kwargs)
    if any(detached):
        raise SeamError("Replay is detached on some processes only: detach on all, after the same update.")
    session.settle()
    folder = checkpoint_folder(trainer, trial)
    saves = trainer.args.should_save

    def make_room() -> list[str]:
        if saves:
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        _remove(folder / FOLDER)
        return [path.name for path in numbered_checkpoints(folder.parent)] if saves else []

    listed = run_on_all_ranks(make_room, CheckpointError)
    part = RankPart(session)
    tables = run_on_all_ranks(lambda: part.begin(folder / FOLDER), CheckpointError)

    def write() -> None:
        if trainer.args.save_total_limit and not saves:
            rank = int(trainer.accelerator.process_index)
            present = {folder.name}.union(*(names or [] for names in listed))
            _rotate(folder.parent, rank, present)
        try:
            part.write(folder / FOLDER, save_id, [str(table) for table in tables])
        except OSError as error:
            raise CheckpointError(
                f"The replay buffer can't be written to {folder}: {error}. Make room there, or give another "
                "output_dir; the checkpoint before is whole."
            ) from error

    run_on_all_ranks(write, CheckpointError)
    written = sorted(path.name for path in (folder / FOLDER).glob("rank-*"))
    put_save_id(trainer.state, save_id, written)
    return stock(model, trial, **kwargs)


def _rotate(output_dir: Path, rank: int, present: Set[str]) -> None:
    """Remove this rank's part of checkpoints that the trainer has rotated where it saves.

    On another machine's disk it rotates nothing: of the little that it writes there, all stays.
    """
    for path in numbered_checkpoints(output_dir):
        if path.name not in present:
            _remove(rank_folder(path / FOLDER, rank))
            with contextlib.suppress(OSError):  # other ranks' parts are there still, or it is gone
                (path / FOLDER).rmdir()


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one; other ranks may be doing the same."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def load(session: AttachedSession, trainer: Any, stock: Callable[..., Any], path: str | None) -> Any:
    """Let stock restore its part, and then puts the session where it was.

    Raises:
        MismatchError: The checkpoint is of another run, and `replay_on_mismatch` is `"refuse"`.
        CheckpointError: Its replay files are damaged, or a strategy or plugin can't take what was saved of it, and
            `replay_on_mismatch` is `"refuse"`.
    """
    result = stock(path)
    if path is None or session.detached:
        return result
    session.roll_call("resume", "resuming from a checkpoint")
    part = RankPart(session)
    added = part.added()
    _restore(part, Path(path))
    part.tell_added(added)
    return result


def _restore(part: RankPart, checkpoint: Path) -> None:
    """Every process reads, all tell each other how it went, and then all take what they read, or none does. Where
    training is to go on without, generators, strategies and plugins are as they were."""
    folder = checkpoint / FOLDER
    if not any(gather_object([folder.is_dir()])):
        warnings.warn(f"{checkpoint} holds no replay buffer: training resumes with an empty one.", stacklevel=3)
        part.empty()
        return
    config = part.settings.config
    scope_at_attach, on_mismatch = (config.replay_scope, part.settings.chosen_scope), config.replay_on_mismatch
    _keep_scope(part, folder)
    states: list[RankState] = []
    undo: list[Callable[[], None]] = [part.empty]

    def read() -> list[str]:
        states.extend(part.read(folder))
        return part.rule_changes(states)

    with tempfile.TemporaryDirectory() as scratch:
        try:
            changes = run_on_all_ranks(read, CheckpointError)[0]  # the first rank's count
            if on_mismatch == "empty":
                run_on_all_ranks(lambda: undo.append(part.remember(Path(scratch))), CheckpointError)
            run_on_all_ranks(lambda: part.apply(states, folder, changes or ()), CheckpointError)
        except ReplayError as error:
            run_on_all_ranks(undo[-1], CheckpointError)
            if on_mismatch != "empty":
                error.args = (f"{error} {REMEDY}", *error.args[1:])
                raise
            warnings.warn(f"Training resumes with an empty replay buffer. {error}", stacklevel=3)
            part.restore_saved_scope(*scope_at_attach)
            part.empty()
            return


def _keep_scope(part: RankPart, folder: Path) -> None:
    """A scope that nobody named gives way to the checkpoint's, on all processes or on none."""
    chosen = bool(part.settings.chosen_scope)
    then = set(gather_object([scope_in(folder) if chosen else ""]))
    name = then.pop() if len(then) == 1 else ""
    if name:
        part.restore_saved_scope(name, "as in the checkpoint that training was resumed from")
