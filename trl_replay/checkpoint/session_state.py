"""A session's state: taken out of it for a checkpoint, and put back when training resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import compat
from ..buffer.candidates import (
    Candidate,
    PendingGroups,
    StepCarry,
    logps_dtype,
    with_named_rewards,
)
from ..counters import NO_ROOM, Tally
from ..errors import CheckpointError, MismatchError
from ..session import Session
from ..strategies.scopes import GatheredScope, ProcessScope, ShardedScope
from ..types import Group
from . import format as saved
from .discovery import TRAINER_STATE
from .format import Identity, RankState, plain
from .reshard import RankShard, ReadyGroups, reshard


def identity(session: Session) -> Identity:
    """What this run is like."""
    trainer, scope = session.trainer, session.config.replay_scope
    return Identity(
        tokenizer=compat.tokenizer_fingerprint(trainer),
        vocabulary=compat.vocabulary_size(trainer),
        num_generations=session.components.num_generations,
        scope=scope if isinstance(scope, str) else type(scope).__name__,
        processes=session.components.processes,
        rows=compat.local_rows(trainer),
    )


def write(session: Session, folder: Path) -> None:
    """Writes this rank's part of a checkpoint. Nothing settles and nothing of the session changes.

    Args:
        session ([`Session`]): Between two updates.
        folder (`Path`): The checkpoint's `trl_replay`.
    """
    buffer, accelerator = session.buffer, session.trainer.accelerator
    rank, args = int(accelerator.process_index), session.trainer.args
    payload_rank, held = rank, buffer.held()
    if isinstance(session.scope, GatheredScope) and not isinstance(session.scope, ShardedScope):
        payload_rank = rank - int(accelerator.local_process_index) if args.save_on_each_node else 0
        held = held if payload_rank == rank else []
    state = RankState(
        identity=identity(session),
        rank=rank,
        payload_rank=payload_rank,
        session=_numbers(session),
        columns={name: getattr(buffer.table, name).copy() for name in buffer.table.names},
        keysets=buffer.keysets,
        noted=session.carry.pending_groups,
        beside=compat.files_beside(session.trainer),
        log=compat.log_digest(session.trainer.state.log_history) if args.should_save else None,
    )
    payload = ((serial, buffer.load(serial)) for serial in held)
    saved.write(
        folder,
        state,
        payload,
        lambda directory: session.components.hooks.save(session, directory),
    )


def read(session: Session, folder: Path) -> list[RankState]:
    """This rank's part of a checkpoint; of one that was written by other ranks than now, the parts of all of them.

    Raises:
        CheckpointError: Files are damaged or missing.
        MismatchError: The run was another one; all differences are named, with both values.
    """
    rank, ranks = (
        int(session.trainer.accelerator.process_index),
        saved.ranks_in(folder),
    )
    if not ranks:
        raise CheckpointError(f"{folder} holds no rank's files.")
    found = saved.read(folder, rank if rank in ranks else ranks[0])
    now = identity(session)
    _refuse_differences(found.identity, now, session)
    if _layout(found.identity) == _layout(now):
        states = [found if found.rank == rank else saved.read(folder, rank)]
    else:
        states = [saved.read(folder, number) for number in range(found.identity.processes)]
    _refuse_foreign_run(states, folder)
    return states


def apply(session: Session, states: list[RankState], folder: Path) -> None:
    """Puts a session in the state that `read` found, in place of its own."""
    buffer, rank = (
        session.buffer,
        int(session.trainer.accelerator.process_index),
    )
    mine = states[rank % len(states)]
    same = _layout(mine.identity) == _layout(identity(session))
    alone, take = kind_of(session) == "process", _taking(session, mine)
    _take_numbers(session, mine.session, own=same or rank < len(states), shared=not alone)
    _take_totals(
        session,
        states[rank :: session.components.processes] if alone and not same else [mine],
    )
    if same:
        buffer.restore(mine.columns, mine.keysets)
        _fill(session, mine.payload(), take)
        session.carry.pending_groups = mine.noted and _noted_here(session, mine.noted, take)
        session.carry.drawn = dict(mine.session["drawn"])
        session.tap.stats.restore(mine.session["measured"])
    else:
        shares = RankShard(kind_of(session), rank, session.components.processes)
        resharded = reshard(states, shares, session.components.fields)
        buffer.restore(resharded.columns, resharded.keysets)
        _fill(session, resharded.payload(), take)
        session.carry.serial = resharded.next_serial
        _settle(session, resharded.waiting, take)
    session.components.hooks.load(session, saved.rank_folder(folder, mine.rank) / saved.PLUGINS)


def empty(session: Session) -> None:
    """Forgets entries and candidates: training resumes with an empty buffer."""
    session.buffer.clear()
    session.carry = StepCarry()


def _fill(
    session: Session,
    payload: Iterable[tuple[int, Group]],
    take: Callable[[Group], Group],
) -> None:
    """Lets entries leave that a smaller buffer than then has no room for, and takes the payload of the others."""
    session.decide.trim()
    kept = set(session.buffer.table.serial.tolist())
    for serial, group in payload:
        if serial in kept:
            session.buffer.receive({serial: take(group)}, keep=False)


def withdraw_unrestored(session: Session, unrestored: Sequence[Sequence[int]]) -> None:
    """Forgets restored entries that some rank's storage had no room for, on all ranks that share them.

    Args:
        session ([`Session`]): After `apply`.
        unrestored (`Sequence`): Of each rank, the buffer's `unrestored`.
    """
    mine = [unrestored[session.trainer.accelerator.process_index]] if kind_of(session) == "process" else unrestored
    tally = Tally()
    tally.refuse(
        session.buffer.withdraw([serial for part in mine for serial in part]),
        NO_ROOM,
    )
    session.totals.add(tally, batches=0)


def _settle(session: Session, waiting: ReadyGroups, take: Callable[[Group], Group]) -> None:
    """Offers candidates that other ranks left, now whole, to the buffer: the new batches have no place for them."""
    tally, table = Tally(), session.buffer.table
    tally.refuse(
        waiting.dropped,
        "a row's log-probs were missing when the number of processes changed",
    )
    if waiting.groups is not None:
        kept = session.decide.offer(waiting.groups, waiting.serials, waiting.sizes, waiting.keys, tally)
        for serial in kept:
            table.owner[table.serial == serial] = waiting.owners[serial]
        session.buffer.receive({serial: take(group) for serial, group in waiting.payload.items() if serial in kept})
    session.totals.add(tally, batches=0)


def _layout(run: Identity) -> tuple[int, int]:
    return run.processes, run.rows


def kind_of(session: Session) -> str | None:
    """How the ranks' buffers belong together; None for a scope that is not ours."""
    kinds = (
        (ShardedScope, "sharded"),
        (GatheredScope, "gathered"),
        (ProcessScope, "process"),
    )
    return next(
        (kind for scope, kind in kinds if isinstance(session.scope, scope)),
        None,
    )


def _refuse_differences(then: Identity, now: Identity, session: Session) -> None:
    words = {
        "tokenizer": "the tokenizer's fingerprint",
        "vocabulary": "the model's vocabulary size",
        "num_generations": "num_generations",
        "scope": "replay_scope",
    }
    differences = [
        f"{told} was {getattr(then, name)!r} and is {getattr(now, name)!r}"
        for name, told in words.items()
        if getattr(then, name) != getattr(now, name)
    ]
    if _layout(then) != _layout(now) and kind_of(session) is None:
        differences.append(
            f"{then.processes} processes of {then.rows} rows each wrote it and {now.processes} of {now.rows} read it, "
            f"and how replay_scope={now.scope!r} divides a buffer is not known"
        )
    if differences:
        raise MismatchError(
            f"The buffer in this checkpoint does not fit this run: {'; '.join(differences)}. Resume with the values "
            "of then, or set replay_on_mismatch='empty' to go on with an empty buffer."
        )


def _refuse_foreign_run(states: Sequence[RankState], folder: Path) -> None:
    """Ours must have been written with the rest: a run without replay leaves them where they were."""
    path = folder.parent / TRAINER_STATE
    logs = {state.log for state in states if state.log is not None}
    if logs and path.is_file() and {compat.log_digest(json.loads(path.read_text())["log_history"])} != logs:
        raise MismatchError(
            f"{folder} does not belong to the rest of the checkpoint: another run, without replay, has written over "
            "it. Delete that folder, or set replay_on_mismatch='empty', to go on with an empty buffer."
        )


def _numbers(session: Session) -> dict[str, Any]:
    """What JSON holds of a session."""
    components, carry, totals = (
        session.components,
        session.carry,
        session.totals,
    )
    measured = session.tap.stats.columns(compat.local_rows(session.trainer)) if carry.drawn else {}
    return {
        "update": session.tap.update,
        "verified": session.tap.verified,
        "serial": carry.serial,
        "noted_at": carry.collected_at,
        "pending": carry.unfinished,
        "warmed": carry.warmed,
        "drawn": sorted(carry.drawn.items()),
        "measured": {name: values.tolist() for name, values in measured.items()},
        "generators": {
            "shared": components.rng.bit_generator.state,
            "local": components.local_rng.bit_generator.state,
        },
        "metrics": session.metrics,
        "totals": {
            "batches": totals.batches,
            "counters": {name: float(count) for name, count in totals.counters.items()},
            "reasons": dict(totals.reasons),
        },
        "strategies": {name: plain(part.state_dict(), name) for name, part in components.stateful.items()},
        "reward_functions": list(session.trainer.reward_func_names),
    }


def _take_numbers(session: Session, state: Mapping[str, Any], own: bool, shared: bool) -> None:
    """Takes what `_numbers` gave.

    Args:
        session ([`Session`]): To be changed.
        state (`Mapping`): As read.
        own (`bool`): Whether this rank existed then; if not, it keeps the generators that it was made with.
        shared (`bool`): Whether ranks that share a buffer draw alike.
    """
    components = session.components
    session.tap.update = state["update"]
    session.tap.verified = state["verified"]
    session.carry = StepCarry(
        state["serial"],
        None,
        state["noted_at"],
        state["pending"],
        state["warmed"],
    )
    if own or shared:
        components.rng.bit_generator.state = state["generators"]["shared"]
    if own:
        components.local_rng.bit_generator.state = state["generators"]["local"]
    session.metrics = dict(state["metrics"])
    for name, part in components.stateful.items():
        if name in state["strategies"]:
            part.load_state_dict(state["strategies"][name])


def _take_totals(session: Session, states: list[RankState]) -> None:
    """Takes the counters of one rank, or of several that this one follows; none if it follows nobody."""
    totals, told = session.totals, [state.session["totals"] for state in states]
    totals.batches = max((each["batches"] for each in told), default=0)
    totals.counters, totals.reasons = Counter(), Counter()
    for each in told:
        totals.counters.update(each["counters"])
        totals.reasons.update(each["reasons"])


def _taking(session: Session, then: RankState) -> Callable[[Group], Group]:
    """What makes a saved group this run's: on its device, with its reward functions' names."""
    device = session.trainer.accelerator.device
    names = (
        then.session["reward_functions"],
        list(session.trainer.reward_func_names),
    )
    return lambda group: with_named_rewards(group.map(lambda tensor: tensor.to(device)), *names)


def _noted_here(session: Session, noted: PendingGroups, take: Callable[[Group], Group]) -> PendingGroups:
    """Candidates wait on the training device, where their rows were cut."""
    device = session.trainer.accelerator.device
    candidates = [
        Candidate(
            waiting.serial,
            waiting.slot,
            None if waiting.group is None else take(waiting.group),
            waiting.keys,
            waiting.rows,
            waiting.update,
            [None if record is None else record.to(device) for record in waiting.records],
            logps_dtype(session.components.fields),
        )
        for waiting in noted.candidates
    ]
    return PendingGroups(noted.groups, candidates, noted.stale)
