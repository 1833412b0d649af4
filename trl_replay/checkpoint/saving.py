"""Around the trainer's own saving and loading of checkpoints: every process together, ours before stock's."""

from __future__ import annotations

import contextlib
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from .. import compat
from ..buffer.replay_buffer import OTHER_RULE
from ..compat import checkpoint_folder
from ..data.counters import Tally
from ..data.rewards import RewardRule
from ..data.types import Packed
from ..distributed.communicator import run_on_all_ranks
from ..errors import CheckpointError, MismatchError, ReplayError, SeamError
from ..generation.prompts import Dataset
from ..protocols import AttachedSession
from ..setup import assembly
from ..setup.settings import Components, Settings
from ..strategies.scopes import SCOPES
from . import format as files
from .discovery import FOLDER, TRAINER_STATE, numbered_checkpoints, put_save_id, read_save_id
from .format import Identity, RankState, TargetRank, plain, rank_folder, reshard, scope_in

IDENTITY_LABELS = {
    "tokenizer": "the tokenizer's fingerprint",
    "vocabulary": "the model's vocabulary size",
    "num_generations": "num_generations",
    "scope": "replay_scope",
    "task_columns": "replay_task_columns",
}
"""Facts of [`Identity`] that must be the same, and what an error calls them."""
GONE = "the row of the dataset that it was generated for is gone or has other columns now"
REPLACED = "training resumed with the buffer of its checkpoint"


class RankPart:
    """One rank's part of a session's checkpoints.

    Args:
        session ([`AttachedSession`]): Between two updates.
    """

    def __init__(self, session: AttachedSession) -> None:
        self._session = session
        self._trainer = session.trainer
        self._components: Components = session.components
        self._buffer = self._components.buffer
        self._rank = int(session.trainer.accelerator.process_index)

    @property
    def settings(self) -> Settings:
        """What the session goes by now."""
        return self._components.settings

    def identity(self) -> Identity:
        """Collect the facts about this run."""
        trainer = self._trainer
        return Identity(
            tokenizer=compat.tokenizer_fingerprint(trainer),
            vocabulary=compat.vocabulary_size(trainer),
            num_generations=self._components.num_generations,
            scope=self.settings.config.replay_scope,
            task_columns=self.settings.task_columns,
            ratios=compat.sampler_ratio_mode(trainer),
            processes=self._components.processes,
            rows=compat.local_rows(trainer),
        )

    def begin(self, folder: Path) -> str:
        """Make its folder in a checkpoint's `trl_replay`, and return a hash of its table."""
        files.rank_folder(folder, self._rank).mkdir(parents=True)
        return files.hash_of_table(self._buffer.state_dict()["columns"])

    def write(self, folder: Path, save_id: str, tables: Sequence[str]) -> None:
        """Write it. Nothing of the session changes.

        Args:
            folder (`Path`): The checkpoint's `trl_replay`.
            save_id (`str`): What the trainer's own files are told to carry too.
            tables (`Sequence[str]`): What `begin` returned on each rank.
        """
        state, hooks = self._rank_state(save_id), self._components.hooks
        payload = self._buffer.payload()
        files.write(folder, state, tables, payload, lambda directory: hooks.save(self._session, directory))

    def _rank_state(self, save_id: str) -> RankState:
        """This rank's session, without payload."""
        state = {**self._session.state_dict(), **self._buffer.state_dict()}
        arrays = {name: state.pop(name) for name in ("columns", "keysets", "prompts")}
        state["strategies"] = {name: plain(strategy, name) for name, strategy in state["strategies"].items()}
        state["strategy_names"] = self._strategy_names()
        return RankState(
            identity=self.identity(),
            rank=self._rank,
            session=state,
            beside=compat.files_beside(self._trainer),
            save_id=save_id,
            **arrays,
        )

    def _strategy_names(self) -> dict[str, str]:
        """Name the strategy of each kind with running state, so that no other strategy takes that state."""
        labels: dict[str, str] = {kind: strategy.label for kind, strategy in self.settings.strategies.items()}
        return {name: labels.get(name, name) for name in self._buffer.policy.running}

    def _for_these_strategies(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state without what other strategies than today's have written."""
        then = state["strategy_names"]
        now = self._strategy_names()
        others = {kind for kind in state["strategies"] if then[kind] != now.get(kind)}
        for kind in sorted(others):
            today = repr(now[kind]) if kind in now else "today's"
            warnings.warn(
                f"The {kind} in this checkpoint was {then[kind]!r}; {today} starts without its running state.",
                stacklevel=2,
            )
        kept = {kind: value for kind, value in state["strategies"].items() if kind not in others}
        return {**state, "strategies": kept}

    def restore_saved_scope(self, name: Any, reason: str) -> None:
        """Put another scope in the place of the session's, if it is a built-in one that fits the layout of today; of a
        checkpoint's that does not, `read` will tell the difference.

        It is done before anything of a checkpoint is read.

        Args:
            name (`str`): Of the scope.
            reason (`str`): Why this one.
        """
        settings = self.settings
        straddling = compat.local_rows(self._trainer) % self._components.num_generations > 0
        if name == settings.config.replay_scope or name not in SCOPES or (name == "process" and straddling):
            return
        self._buffer.clear()
        assembly.apply_scope(self._trainer, settings.with_scope(name, reason), self._components)

    def read(self, folder: Path) -> list[RankState]:
        """This rank's part of a checkpoint; of one that was written by other ranks than now, the parts of all of them.

        Raises:
            CheckpointError: Files are damaged or missing.
            MismatchError: The run was another one; all differences are named, with both values.
        """
        rank = self._rank
        ranks = files.ranks_in(folder)
        if not ranks:
            raise CheckpointError(f"{folder} holds no rank's files. {files.REMEDY}")
        found = files.read(folder, rank if rank in ranks else ranks[0])
        now = self.identity()
        _refuse_differences(found.identity, now)
        if found.identity.layout != now.layout:
            tables: dict[Path, Any] = {}
            states = [files.read(folder, number, tables) for number in range(found.identity.processes)]
        elif found.rank == rank:
            states = [found]
        else:
            states = [files.read(folder, rank)]
        _refuse_foreign_run(states, folder)
        _refuse_impossible_updates(states, folder)
        return states

    def rule_changes(self, states: Sequence[RankState]) -> list[str]:
        """Describe how the reward rule differs from that of the first rank then; nothing if it is the same."""
        return RewardRule.of(states[0].session["reward_rule"]).changes(compat.reward_rule(self._trainer))

    def apply(self, states: list[RankState], folder: Path, changes: Sequence[str] = ()) -> None:
        """Put a session in the state that `read` found, in place of its own; without its groups where another reward
        rule scored them.

        Args:
            states (`list[RankState]`): What `read` found.
            folder (`Path`): The checkpoint's `trl_replay`.
            changes (`Sequence[str]`): What the first rank found with `rule_changes`.

        Raises:
            CheckpointError: A strategy or a plugin can't take what was saved of it. The session is half in that state.
        """
        try:
            self._apply(states, folder, changes)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".removesuffix(".")
            raise CheckpointError(
                f"{folder.parent} can't be resumed from: {reason}. Mend that, or resume from another checkpoint."
            ) from error

    def _apply(self, states: Sequence[RankState], folder: Path, changes: Sequence[str]) -> None:
        rule, tally = compat.reward_rule(self._trainer), Tally()
        if changes:
            tally.retire(len(states[self._rank % len(states)].columns["serial"]), OTHER_RULE)
            states = [state.without_groups(rule) for state in states]
        gone = sorted({task for state in states for task in self._gone(state)})
        same = states[0].identity.layout == self.identity().layout
        mine = states[self._rank % len(states)]
        if same:
            self._apply_own(mine)
        else:
            self._apply_resharded(states, mine)
        tally.retire(self._buffer.score_by(rule, changes, tells=self._rank == 0), OTHER_RULE)
        self._buffer.totals.add(tally, batches=0)
        self._forget_gone(gone)
        absent = sorted(mine.columns.keys() - self._buffer.table.names)
        if absent:
            self._tell(f"Entries lose their columns {', '.join(absent)}: add them in trl_replay_attached, to resume.")
        written = files.rank_folder(folder, mine.rank)
        self._components.hooks.load(self._session, written / files.PLUGINS)

    def _apply_own(self, mine: RankState) -> None:
        """Every rank goes on where it was."""
        self._buffer.totals.load_state_dict(mine.session["totals"], mine.session["totals"])
        self._buffer.load_state_dict(
            {**self._for_these_strategies(mine.session), "columns": mine.columns, "keysets": mine.keysets}
        )
        self._session.load_state_dict({**mine.session, "prompts": mine.prompts})  # by its clock
        self._fill(mine.payload)

    def _apply_resharded(self, states: Sequence[RankState], mine: RankState) -> None:
        """Entries of all ranks are dealt to other ranks."""
        one_buffer = self._components.scope.one_buffer
        rank, ranks = self._rank, self._components.processes
        existed = rank < len(states)
        of_ranks = [
            {**state.session, "prompts": state.prompts if state is mine or not one_buffer else None}
            for state in states
        ]
        self._session.load_state_dict(mine.session, of_ranks)
        followed = [mine] if one_buffer else states[rank::ranks]
        self._buffer.totals.load_state_dict(*(state.session["totals"] for state in [mine, *followed]))
        resharded = reshard(states, TargetRank(one_buffer, rank, ranks))
        state = {
            **self._for_these_strategies(mine.session),
            "columns": resharded.columns,
            "keysets": resharded.keysets,
        }
        state["serial"] = max(resharded.next_serial, mine.session["serial"])
        self._buffer.load_state_dict(state, own=existed, shared=existed or one_buffer)
        self._fill(resharded.payload)

    def _gone(self, state: RankState) -> list[int]:
        """The tasks of this run's groups that are no longer in the dataset: their row is gone, or a column of it, such
        as the label, is another."""
        columns = state.columns
        stored = set(columns["prompt"][columns["origin"] == 0].tolist())
        stored = {task for task in stored if task > 0}  # others are no row's
        if compat.has_environments(self._trainer) or not compat.computes_rewards(self._trainer):
            return []  # environments, or a worker, say what the tasks are
        why_not = compat.why_rows_cant_be_asked(self._trainer) if stored else ""
        if why_not:
            self._tell(f"Whether the tasks of stored groups are still in the dataset can't be told: {why_not}.")
        if why_not or not stored:
            return []
        dataset = Dataset(lambda: compat.training_data(self._trainer), self._components.tasks.key)
        for row in dataset:
            stored.discard(dataset.key(row))
            if not stored:
                break
        return sorted(stored)

    def _forget_gone(self, tasks: Sequence[int]) -> None:
        table = self._buffer.table
        dropped = self._buffer.forget(np.isin(table.prompt, tasks) & (table.origin == 0))
        if dropped:
            self._buffer.totals.reasons[f"an entry was dropped: {GONE}"] += dropped
            self._tell(f"{dropped} stored groups left the replay buffer: {GONE}.")

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            warnings.warn(text, stacklevel=2)

    def added(self) -> int:
        """Count the groups that were added, by hand or from a file, before anything was trained on."""
        return 0 if self._buffer.clock.update else len(self._buffer)

    def tell_added(self, count: int) -> None:
        """Count and tell groups that were added before training resumed, and are not in its buffer."""
        if count:
            self._buffer.totals.reasons[f"an entry was dropped: {REPLACED}"] += count
            self._tell(
                f"{count} groups that were added to the replay buffer left it: {REPLACED}. Add them in a callback's "
                "on_train_begin, which comes after."
            )

    def empty(self) -> None:
        """Forget entries and candidates: training resumes with an empty buffer."""
        self._buffer.clear()
        self._buffer.serial, self._buffer.warmed = 0, False
        self._session.forget_pending()

    def _fill(self, payload: Callable[[set[int]], Iterable[tuple[int, Packed]]]) -> None:
        """Let entries leave that a smaller buffer than then has no room for, and take the payload of the others."""
        self._buffer.trim()
        kept = set(self._buffer.table.serial.tolist())
        self._buffer.receive(dict(payload(kept)))
        table = self._buffer.table
        due = table.serial[table.owner == self._rank] if self._components.scope.one_buffer else table.serial
        lost = sorted(set(due.tolist()) - set(self._buffer.held()))
        if lost:
            raise CheckpointError(f"its table has the entries {lost}, of which no file holds the tokens")


def _refuse_differences(then: Identity, now: Identity) -> None:
    differences = []
    for name, words in IDENTITY_LABELS.items():
        was = getattr(then, name)
        is_now = getattr(now, name)
        if was != is_now:
            differences.append(f"{words} was {was!r} and is {is_now!r}")
    if then.ratios and now.ratios and compat.is_of_sequences(then.ratios) != compat.is_of_sequences(now.ratios):
        differences.append(f"vllm_importance_sampling_mode was {then.ratios!r} and is {now.ratios!r}")
    if differences:
        raise MismatchError(
            f"The buffer in this checkpoint does not fit this run: {'; '.join(differences)}. Resume with the values "
            "of then."
        )


def _refuse_foreign_run(states: Sequence[RankState], folder: Path) -> None:
    """Refuse files that were not saved together, and with the trainer's: a run without replay leaves older ones
    where they were."""
    told = read_save_id(folder.parent)
    if told is None or {state.save_id for state in states} != {told.save_id}:
        raise MismatchError(files.FOREIGN.format(folder) + files.REMEDY)


def _refuse_impossible_updates(states: Sequence[RankState], folder: Path) -> None:
    """Refuse entries of updates to come, whose age would be negative, and negative counts of updates."""
    for state in states:
        update = state.session["update"]
        latest = max(state.columns["update"], default=0)
        if not isinstance(update, int) or update < max(latest, 0):
            raise CheckpointError(
                f"{files.rank_folder(folder, state.rank)} says that it was saved at update {update!r}, with entries "
                f"of updates up to {latest}: that can't be. Resume from another checkpoint."
            )


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
        MismatchError: The checkpoint is of another run.
        CheckpointError: Its replay files are damaged, or a strategy or plugin can't take what was saved of it.
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
    """Every process reads, all tell each other how it went, and then all take what they read, or none does."""
    folder = checkpoint / FOLDER
    if not any(gather_object([folder.is_dir()])):
        warnings.warn(f"{checkpoint} holds no replay buffer: training resumes with an empty one.", stacklevel=3)
        part.empty()
        return
    _keep_scope(part, folder)
    states: list[RankState] = []

    def read() -> list[str]:
        states.extend(part.read(folder))
        return part.rule_changes(states)

    try:
        changes = run_on_all_ranks(read, CheckpointError)[0]  # the first rank's count
        run_on_all_ranks(lambda: part.apply(states, folder, changes or ()), CheckpointError)
    except ReplayError as error:
        run_on_all_ranks(part.empty, CheckpointError)
        error.args = (f"{error} To go on with an empty buffer, remove the folder {folder}.", *error.args[1:])
        raise


def _keep_scope(part: RankPart, folder: Path) -> None:
    """A scope that nobody named gives way to the checkpoint's, on all processes or on none."""
    chosen = bool(part.settings.chosen_scope)
    then = set(gather_object([scope_in(folder) if chosen else ""]))
    name = then.pop() if len(then) == 1 else ""
    if name:
        part.restore_saved_scope(name, "as in the checkpoint that training was resumed from")
