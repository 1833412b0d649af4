"""A session's state: taken out of it for a checkpoint, and put back when training resumes."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..base.code import differs
from ..batch.candidates import PendingGroups
from ..batch.stored import logps_dtype, named_rewards, with_named_rewards
from ..buffer import Newcomer
from ..data.counters import Tally
from ..data.types import Group, Groups
from ..errors import CheckpointError, MismatchError
from ..protocols import Columns
from ..session import Session
from ..setup import assembly
from ..step.carry import StepCarry
from ..strategies.scope_choice import SCOPES
from . import format as files
from .format import Identity, RankState, plain
from .reshard import RankShard, Resharded, reshard
from .save_id import read_save_id

TOLD = {
    "tokenizer": "the tokenizer's fingerprint",
    "vocabulary": "the model's vocabulary size",
    "num_generations": "num_generations",
    "scope": "replay_scope",
    "task_columns": "replay_task_columns",
}
"""Facts of [`Identity`] that must be the same, and what an error calls them."""


LONGER = "a completion is longer than max_completion_length"


def identity(session: Session) -> Identity:
    """Collect the facts about this run."""
    trainer = session.trainer
    return Identity(
        tokenizer=compat.tokenizer_fingerprint(trainer),
        vocabulary=compat.vocabulary_size(trainer),
        num_generations=session.components.num_generations,
        scope=session.settings.label("scope"),
        task_columns=session.settings.task_columns,
        ratios=compat.sampler_ratio_mode(trainer),
        processes=session.components.processes,
        rows=compat.local_rows(trainer),
    )


def write(session: Session, folder: Path, save_id: str) -> None:
    """Write this rank's part of a checkpoint. Nothing settles and nothing of the session changes.

    Args:
        session ([`Session`]): Between two updates.
        folder (`Path`): The checkpoint's `trl_replay`.
        save_id (`str`): What the trainer's own files are told to carry too.
    """
    state = _rank_state(session, save_id)
    held = session.buffer.held() if state.payload_rank == state.rank else []
    payload = ((serial, session.buffer.load(serial)) for serial in held)
    hooks = session.components.hooks
    files.write(folder, state, payload, lambda directory: hooks.save(session, directory))


def remember(session: Session, scratch: Path) -> Callable[[], None]:
    """Empty a session, and return what puts it back there after `apply`: buffer, generators, strategies, plugins.

    Args:
        session ([`Session`]): Before `apply`.
        scratch (`Path`): An empty folder, in which plugins keep theirs as long as it may be needed.
    """
    empty(session)
    state = copy.deepcopy(_rank_state(session, save_id=""))
    hooks = session.components.hooks
    hooks.save(session, scratch)

    def undo() -> None:
        _apply_own(session, state)
        hooks.load(session, scratch)

    return undo


def _rank_state(session: Session, save_id: str) -> RankState:
    """This rank's session, without payload."""
    trainer = session.trainer
    buffer = session.buffer.state_dict()
    columns, keysets = buffer.pop("columns"), buffer.pop("keysets")
    return RankState(
        identity=identity(session),
        rank=_rank(session),
        payload_rank=_payload_rank(session),
        session=_json_state(session, buffer),
        columns=columns,
        keysets=keysets,
        pending=session.carry.pending,
        beside=compat.files_beside(trainer),
        save_id=save_id,
        prompts=None if session.rounds is None else session.rounds.table.state_dict(),
    )


def _json_state(session: Session, buffer: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what JSON holds of a session and its buffer."""
    state = {**session.state_dict(), **buffer}
    state["strategies"] = {name: plain(strategy, name) for name, strategy in buffer["strategies"].items()}
    state["strategy_names"] = _strategy_names(session)
    state["max_completion_length"] = session.trainer.args.max_completion_length
    state["reward_functions"] = list(session.trainer.reward_func_names)
    state["reward_code"] = session.reward_code
    return state


def _strategy_names(session: Session) -> dict[str, str]:
    """Name the strategy of each kind with running state, so that no other strategy takes that state."""
    labels: dict[str, str] = {kind: strategy.label for kind, strategy in session.settings.strategies.items()}
    return {name: labels.get(name, name) for name in session.buffer.rules.running}


def _for_these_strategies(session: Session, state: dict[str, Any]) -> dict[str, Any]:
    """The state without what other strategies than today's have written."""
    then = state["strategy_names"]
    now = _strategy_names(session)
    others = {kind for kind in state["strategies"] if then[kind] != now.get(kind)}
    for kind in sorted(others):
        today = repr(now[kind]) if kind in now else "today's"
        warnings.warn(
            f"The {kind} in this checkpoint was {then[kind]!r}; {today} starts without its running state.",
            stacklevel=2,
        )
    kept = {kind: value for kind, value in state["strategies"].items() if kind not in others}
    return {**state, "strategies": kept}


def _rank(session: Session) -> int:
    return int(session.trainer.accelerator.process_index)


def _payload_rank(session: Session) -> int:
    """The rank that writes the payload that this rank holds: of a buffer that all ranks hold, one for each disk."""
    rank = _rank(session)
    if not session.scope.division.replicated:
        return rank
    if not session.trainer.args.save_on_each_node:
        return 0
    return rank - int(session.trainer.accelerator.local_process_index)


def exchange_scope(session: Session, name: Any, reason: str) -> None:
    """Put another scope in the place of the session's, if it is a built-in one that fits the layout of today; of a
    checkpoint's that does not, `read` will tell the difference.

    Args:
        session ([`Session`]): Before anything of a checkpoint is read, or after all of it is forgotten.
        name (`str`): Of the scope.
        reason (`str`): Why this one.
    """
    straddling = compat.local_rows(session.trainer) % session.components.num_generations > 0
    if name == session.settings.label("scope") or name not in SCOPES or (name == "process" and straddling):
        return
    settings = session.settings.with_scope(name, reason)
    session.buffer.clear()
    assembly.exchange_scope(session.trainer, settings, session.components)
    session.settings = settings


def read(session: Session, folder: Path) -> list[RankState]:
    """This rank's part of a checkpoint; of one that was written by other ranks than now, the parts of all of them.

    Raises:
        CheckpointError: Files are damaged or missing.
        MismatchError: The run was another one; all differences are named, with both values.
    """
    rank = _rank(session)
    ranks = files.ranks_in(folder)
    if not ranks:
        raise CheckpointError(f"{folder} holds no rank's files. {files.REMEDY}")
    found = files.read(folder, rank if rank in ranks else ranks[0])
    now = identity(session)
    _refuse_differences(found.identity, now, session)
    if found.identity.layout != now.layout:
        states = [files.read(folder, number) for number in range(found.identity.processes)]
    elif found.rank == rank:
        states = [found]
    else:
        states = [files.read(folder, rank)]
    _refuse_foreign_run(states, folder)
    _refuse_impossible_updates(states, folder)
    return states


def apply(session: Session, states: list[RankState], folder: Path) -> None:
    """Put a session in the state that `read` found, in place of its own.

    Raises:
        CheckpointError: A strategy or a plugin can't take what was saved of it. The session is half in that state.
    """
    try:
        _apply(session, states, folder)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(".")
        raise CheckpointError(
            f"{folder.parent} can't be resumed from: {reason}. Mend that, or resume from another checkpoint."
        ) from error


def _apply(session: Session, states: list[RankState], folder: Path) -> None:
    mine = states[_rank(session) % len(states)]
    if mine.identity.layout == identity(session).layout:
        _apply_own(session, mine)
    else:
        _apply_resharded(session, states, mine)
    _forget_other_reference(session, mine)
    _warn_of_other_code(session, mine)
    _forget_longer(session, _shorter(session, mine))
    _refuse_longer(session, _shorter(session, mine))
    written = files.rank_folder(folder, mine.rank)
    session.components.hooks.load(session, written / files.PLUGINS)


def _apply_own(session: Session, mine: RankState) -> None:
    """Every rank goes on where it was."""
    take = _adapter(session, mine)
    session.buffer.load_state_dict(_buffer_state(session, mine, mine.columns, mine.keysets))
    session.load_state_dict(mine.session)  # after the buffer: the queue counts from its clock
    session.totals.load_state_dict(mine.session["totals"], mine.session["totals"])
    _fill(session, mine, mine.payload(), take)
    pending = mine.pending and _on_training_device(session, mine.pending, take, mine)
    session.carry.pending = pending
    session.load_rounds([mine.session], [mine.prompts], own=True)


def _apply_resharded(session: Session, states: Sequence[RankState], mine: RankState) -> None:
    """Entries and candidates of all ranks are dealt to other ranks."""
    division = session.scope.division
    take = _adapter(session, mine)
    rank = _rank(session)
    ranks = session.components.processes
    existed = rank < len(states)
    session.load_state_dict(mine.session)
    followed = [mine] if division.one_buffer else states[rank::ranks]
    session.totals.load_state_dict(*(state.session["totals"] for state in [mine, *followed]))
    tables = [state.prompts for state in ([mine] if division.one_buffer else states)]
    session.load_rounds([state.session for state in states], tables)
    resharded = reshard(states, RankShard(division, rank, ranks), session.components.fields)
    state = _buffer_state(session, mine, resharded.columns, resharded.keysets)
    state["serial"] = resharded.next_serial
    session.buffer.load_state_dict(state, own=existed, shared=existed or division.one_buffer)
    _fill(session, mine, resharded.payload(), take)
    _offer_candidates(session, resharded, take, mine)


def _buffer_state(session: Session, then: RankState, columns: Columns, keysets: Sequence[Any]) -> dict[str, Any]:
    """What the buffer takes: entries, with the rewards of today's functions, and what belongs to its strategies."""
    columns = {**columns, "row_rewards": _named(session, then)(columns["row_rewards"])}
    state = {**_for_these_strategies(session, then.session), "columns": columns, "keysets": keysets}
    return {**state, "reward_setup": _setup_of_today(session, then)}


def _setup_of_today(session: Session, then: RankState) -> dict[str, Any] | None:
    """The rule that made the saved advantages, with its weights in the order of today's reward functions: NaN for new
    ones. It has no name where a function that counted is gone."""
    setup = then.session["reward_setup"]
    if setup is None:
        return None
    weights = np.array(setup["weights"], np.float64)
    today = _named(session, then)(weights)
    is_gone = np.count_nonzero(weights) > np.count_nonzero(np.nan_to_num(today))
    return {**setup, "weights": today.tolist(), **({"aggregation": ""} if is_gone else {})}


def _named(session: Session, then: RankState) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that puts raw rewards in the order of today's reward functions."""
    names_now = list(session.trainer.reward_func_names)
    return partial(named_rewards, then=then.session["reward_functions"], now=names_now)


def _forget_other_reference(session: Session, mine: RankState) -> None:
    """The trainer does not save its reference model: it resumes with the one that it was made with, whatever
    `sync_ref_model` had made of it."""
    session.has_other_reference()
    if mine.session["reference"] != session.reference:
        session.forget_reference()


def _warn_of_other_code(session: Session, mine: RankState) -> None:
    """Tell which reward functions have another code than then, and the same name: what they gave then is stored."""
    then = mine.session["reward_code"]
    others = [name for name, now in session.reward_code.items() if name in then and differs(then[name], now)]
    if others and session.trainer.accelerator.is_main_process and (len(session.buffer) or session.carry.pending):
        warnings.warn(
            f"The code of {', '.join(map(repr, others))} has changed since this checkpoint was written, and the "
            "buffer's groups have the rewards of then. To train on none of them, call session.clear() in the "
            "on_train_begin of a callback.",
            stacklevel=2,
        )


def _shorter(session: Session, mine: RankState) -> float:
    """`max_completion_length`, if it is shorter than then. Longer rows would make batches as wide as then, for which
    memory may be too small."""
    then, now = mine.session["max_completion_length"], session.trainer.args.max_completion_length
    return now if now is not None and (then is None or then > now) else math.inf


def _forget_longer(session: Session, most: float) -> None:
    dropped = session.buffer.forget_longer(most)
    if dropped:
        session.totals.reasons[f"an entry was dropped: {LONGER}={most}"] += dropped


def _refuse_longer(session: Session, most: float) -> None:
    """The same of candidates."""
    pending = session.carry.pending
    if pending is None:
        return
    tally = Tally()
    fitting = [one for one in pending.candidates if pending.groups.lengths[one.slot].max() <= most]
    tally.refuse(len(pending.candidates) - len(fitting), f"{LONGER}={most}")
    session.totals.add(tally, batches=0)
    session.carry.pending = replace(pending, candidates=fitting)


def empty(session: Session) -> None:
    """Forget entries and candidates: training resumes with an empty buffer."""
    session.buffer.clear()
    session.buffer.serial = 0
    session.carry = StepCarry()
    session.resumes_at = 0


def _fill(
    session: Session, mine: RankState, payload: Iterable[tuple[int, Group]], take: Callable[[Group], Group]
) -> None:
    """Let entries leave that are too long, or that a smaller buffer than then has no room for, and take the payload
    of the others."""
    _forget_longer(session, _shorter(session, mine))
    session.buffer.trim()
    kept = set(session.buffer.table.serial.tolist())
    for serial, group in payload:
        if serial in kept:
            session.buffer.receive({serial: take(group)})


def _offer_candidates(session: Session, resharded: Resharded, take: Callable[[Group], Group], then: RankState) -> None:
    """Offer candidates that other ranks left, now whole, to the buffer: the new batches have no place for them."""
    tally = Tally()
    tally.refuse(resharded.dropped, "a row's log-probs were missing when the number of processes changed")
    ready = resharded.ready
    if ready:
        groups = _scored_as_today(Groups.concatenate([one.view for one in ready]), then, session)
        rank = _rank(session)
        newcomers = [
            Newcomer(one.serial, one.group.nbytes, one.keys, one.owner, take(one.group) if one.owner == rank else None)
            for one in ready
        ]
        session.buffer.extend(groups, newcomers, tally)
    session.totals.add(tally, batches=0)


def _refuse_differences(then: Identity, now: Identity, session: Session) -> None:
    differences = []
    for name, words in TOLD.items():
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
        raise MismatchError(
            f"{folder} does not belong to the rest of the checkpoint: another run has written over one of them. "
            + files.REMEDY
        )


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


def _adapter(session: Session, then: RankState) -> Callable[[Group], Group]:
    """Return a function that makes a saved group this run's: on its device, with its reward functions' names."""
    device = session.trainer.accelerator.device
    named = _named(session, then)

    def take(group: Group) -> Group:
        return with_named_rewards(group, named).map(lambda tensor: tensor.to(device))

    return take


def _scored_as_today(groups: Groups, then: RankState, session: Session) -> Groups:
    """The groups with raw rewards in the order of today's reward functions, and their weights."""
    rewards = _named(session, then)(groups.rewards)
    return replace(
        groups,
        rewards=rewards,
        reward_weights=compat.reward_setup(session.trainer).weights,
        counting=session.buffer.table.counting,
    )


def _on_training_device(
    session: Session, pending: PendingGroups, take: Callable[[Group], Group], then: RankState
) -> PendingGroups:
    """Candidates wait on the training device, where their rows were cut."""
    device = session.trainer.accelerator.device
    groups = _scored_as_today(pending.groups, then, session)
    candidates = []
    for saved in pending.candidates:
        records = []
        for record in saved.records:
            records.append(None if record is None else record.to(device))
        group = None if saved.group is None else take(saved.group)
        dtype = logps_dtype(session.components.fields)
        candidate = replace(saved, group=group, records=records, logps_dtype=dtype)
        candidates.append(candidate)
    return PendingGroups(groups, candidates, pending.stale)
