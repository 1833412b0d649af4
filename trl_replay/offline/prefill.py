"""Fills the buffer with groups made elsewhere: read, grouped, tokenised, given log-probs, and offered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from .. import compat
from ..base.validation import choice, require
from ..batch.compose import cut
from ..batch.group_view import describe
from ..buffer.candidates import fill_missing, trainable_sums, with_rewards
from ..compat import STD_EPSILON
from ..data.counters import Tally
from ..data.fields import ADVANTAGES, STORED_REWARD, STORED_REWARDS, FieldTable
from ..data.rewards import bessel_std, mean_of_scored, weighted_rewards
from ..data.tasks import encoded, hashed, own
from ..data.types import Batch, Bools, Floats, Group, Groups
from ..distributed.all_ranks import run_on_all_ranks
from ..errors import ReplayError
from ..protocols import Division
from ..session import Session
from .export import PORTION
from .file_tasks import AMBIGUOUS, UNKNOWN
from .reader import OfflineGroup, read_groups, source_name

FROM_FILE, FROM_POLICY = 1, 2
"""Values of the table's column `origin`: whose log-probs a group made elsewhere has; 0 is a group generated here."""


@dataclass(slots=True)
class Newcomer:
    """A group as the buffer takes it.

    Attributes:
        group ([`Group`]): The payload.
        view ([`Groups`]): What the scorer sees.
        origin (`int`): Whose log-probs it has.
        rewards (`(G, functions)`): Of the trainer's functions; NaN where the file does not name them.
    """

    group: Group
    view: Groups
    origin: int
    rewards: Floats


def begin(session: Session) -> None:
    """Fill the buffer from `replay_warm_start`, once in the life of a run."""
    path = session.settings.config.replay_warm_start
    if path is not None and not session.carry.warmed:
        count = add(session, path, session.settings.config.replay_warm_start_short)
        if not count and session.communicator.rank == 0:
            reasons = "; ".join(session.totals.reasons) or "it has no rows"
            warnings.warn(f"replay_warm_start={path!r} added no group: {reasons}.", stacklevel=2)
        session.carry.warmed = True


def add(session: Session, source: Any, incomplete: str = "refuse") -> int:
    """Add groups made elsewhere: [`ReplayBuffer.add`]. Return their number."""
    require("incomplete", incomplete, choice("refuse", "resample"))
    division = session.scope.division
    tally = Tally()
    session.roll_call("add", "adding groups to its buffer")
    groups, advantages = _read(session, source, incomplete, tally)
    newcomers: list[Newcomer] = []
    for start in range(0, len(groups), PORTION):
        portion = slice(start, start + PORTION)
        newcomers += _prepare(session, groups[portion], advantages[portion])
    trainable = [newcomer for newcomer in newcomers if newcomer.view.trainable.any()]
    tally.refuse(len(newcomers) - len(trainable), "it has no trainable token")
    scored = [newcomer for newcomer in trainable if _has_finite_logps(newcomer.group)]
    tally.refuse(len(trainable) - len(scored), "a trainable token's log-prob is not finite")
    table = session.buffer.table
    before = set(table.serial.tolist())
    try:
        run_on_all_ranks(lambda: _offer(session, scored, division, tally), ReplayError)
    except Exception:
        session.buffer.withdraw(sorted(set(table.serial.tolist()) - before))
        raise
    session.totals.add(tally, batches=0)
    stayed = set(table.serial.tolist()) - before
    if stayed:
        session.components.rate_limiter.prefilled = True
    return len(stayed)


def _read(session: Session, source: Any, incomplete: str, tally: Tally) -> tuple[list[OfflineGroup], list[Floats]]:
    """The groups that can be used, and their advantages; the same ones on all processes.

    A group whose rewards do not differ can be used where its rows stand beside fresh ones, with advantages of all.

    Raises:
        ReplayError: A process can't read them, or reads others.
    """
    groups: list[OfflineGroup] = []
    advantages: list[Floats] = []
    may_be_alike = session.components.mixes_rows and session.settings.config.replay_advantages != "stored"

    def read() -> int:
        whole = read_groups(session, source, incomplete, tally)
        for group, of_group in zip(whole, _advantages(session, whole), strict=True):
            with np.errstate(over="ignore"):
                stored = of_group.astype(np.float32)  # as it will be trained on
            trained = stored[~group.masked]
            if not np.isfinite(stored).all():
                tally.refuse(1, "an advantage is not finite")
            elif not len(trained):
                tally.refuse(1, "all of its rows are masked")
            elif not may_be_alike and not (trained if group.is_shaped else trained - trained[0]).any():
                tally.refuse(1, "its rewards do not differ")
            else:
                if group.task == UNKNOWN:
                    tally.reasons[f"a group of a file counts as a task of its own: {AMBIGUOUS}"] += 1
                    group = replace(group, task=own(session.carry.serial, len(groups)))
                groups.append(group)
                advantages.append(of_group)
        return _digest(groups)

    digests = run_on_all_ranks(read, ReplayError)
    if len(set(digests)) > 1:
        raise ReplayError(
            f"The processes read different groups from {source_name(source)}: give all of them the same file or rows. "
            "Nothing was added."
        )
    return groups, advantages


def _digest(groups: Sequence[OfflineGroup]) -> int:
    """Tell the groups that one process read from those of another."""
    digests = []
    for group in groups:
        rows = [group.prompt_ids, group.completion_ids, group.tokens, group.rewards, max(group.task, UNKNOWN)]
        digests.append(encoded(rows))
    return hashed(*digests)


def _has_finite_logps(group: Group) -> bool:
    """Return whether all trainable tokens have finite log-probs, the policy's and the sampler's."""
    for key in (compat.OLD_LOGPS, compat.SAMPLING_LOGPS):
        if key in group.tensors and not trainable_sums(group, key).isfinite().all():
            return False
    return True


def _offer(session: Session, newcomers: Sequence[Newcomer], division: Division, tally: Tally) -> None:
    """Offer groups to the buffer; this process keeps the payload of its own among those that stay."""
    rank = int(session.trainer.accelerator.process_index)
    ranks = session.components.processes
    if not division.one_buffer:
        newcomers = newcomers[rank::ranks]
    if not newcomers:
        return
    buffer = session.buffer
    buffer.table.reward_weights = compat.reward_setup(session.trainer).weights
    buffer.table.counting = session.components.counting
    serials = session.carry.take_serials(len(newcomers))
    views = [newcomer.view for newcomer in newcomers]
    kept = session.decisions.offer(
        Groups.concatenate(_alike(views)),
        serials,
        [newcomer.group.nbytes for newcomer in newcomers],
        [newcomer.group.keys for newcomer in newcomers],
        tally,
        np.stack([newcomer.rewards for newcomer in newcomers]),
    )
    dealt = division.one_buffer and not division.replicated
    for number, (serial, newcomer) in enumerate(zip(serials, newcomers, strict=True)):
        if serial not in kept:
            continue
        row = buffer.table.serial == serial
        owner = number % ranks if dealt else rank
        buffer.table.writable("origin")[row] = newcomer.origin
        buffer.table.writable("owner")[row] = owner
        if owner == rank:
            buffer.receive({serial: newcomer.group})


def _alike(views: Sequence[Groups]) -> Sequence[Groups]:
    """The views as they are if all have the same reward functions, and else each with its one total."""
    first = views[0].reward_weights
    if all(np.array_equal(view.reward_weights, first) for view in views):
        return views
    totals: list[Groups] = []
    for view in views:
        reward = view.reward[:, :, None]
        totals.append(replace(view, rewards=reward, reward_weights=np.ones(1), counting=None))
    return totals


def _prepare(session: Session, groups: Sequence[OfflineGroup], advantages: Sequence[Floats]) -> list[Newcomer]:
    """Groups as the buffer takes them: with log-probs, and the same bits on all processes."""
    batches: list[Batch] = []

    def compute() -> None:
        for group, of_group in zip(groups, advantages, strict=True):
            batch = _batch(session, group, of_group)
            batches.append(_with_logps(session.trainer, batch))

    run_on_all_ranks(compute, ReplayError)
    if session.components.processes > 1:
        _broadcast(batches)
    newcomers = []
    for group, batch in zip(groups, batches, strict=True):
        origin = FROM_FILE if compat.OLD_LOGPS in group.tokens else FROM_POLICY
        newcomers.append(_cut(session, group, batch, origin))
    return newcomers


def _with_logps(trainer: Any, batch: Batch) -> Batch:
    """The batch with the policy's log-probs where the file has none, and the reference model's.

    Raises:
        ReplayError: The policy can't compute any yet.
    """
    if compat.OLD_LOGPS not in batch and compat.awaits_its_engine(trainer):
        raise ReplayError(
            "The groups have no log-probs, and with DeepSpeed's ZeRO 3 the model can compute none before training "
            "begins: give their file as replay_warm_start, which is read then, or add them in a callback's "
            "on_train_begin."
        )
    training = trainer.model.training
    trainer.model.eval()
    try:
        batch = compat.with_old_logps(trainer, batch)
        return compat.with_reference_logps(trainer, batch)
    finally:
        trainer.model.train(training)


def _broadcast(batches: Sequence[Batch]) -> None:
    """Give all processes the first one's log-probs."""
    for batch in batches:
        for key in (compat.OLD_LOGPS, compat.REF_LOGPS):
            if key in batch:
                batch[key] = broadcast(batch[key].contiguous())


def _cut(session: Session, offline: OfflineGroup, batch: Batch, origin: int) -> Newcomer:
    """One group, through the same cutting as a batch of TRL's."""
    fields = session.components.fields
    size = session.components.num_generations
    batch = _as_sampled(session.trainer, batch, fields)
    (group,) = cut(batch, fields, [slice(0, size)])
    fill_missing(group.tensors)
    if "tool_mask" not in batch:  # a mask of ones takes no room, and lets runs with tools take the group
        group = replace(group, keys=group.keys | {"tool_mask"})
    columns = describe(batch, 0, np.full(size, offline.task), fields)
    view = Groups(
        rewards=offline.rewards[None],
        reward_weights=offline.weights,
        advantages=columns["advantages"][None],
        lengths=columns["lengths"][None],
        trainable=columns["trainable"][None],
        items=columns["items"][None],
        dead=np.zeros(1, bool),
        update=np.array([session.update - 1]),  # so that it is old enough for the next batch
        prompt=columns["prompt"][:1],
        behavior_logps=trainable_sums(group).cpu().numpy()[None],
        masked=_masked(session, offline)[None],
        origin=np.array([origin]),
        counting=session.components.counting if offline.named else None,
    )
    functions = len(session.trainer.reward_func_names)
    rewards = offline.rewards if offline.named else np.full((size, functions), np.nan)
    if offline.named:
        group = with_rewards(group, offline.rewards, STORED_REWARDS)
    else:
        group = with_rewards(group, view.reward[0], STORED_REWARD)
    return Newcomer(group, view, origin, rewards)


def _as_sampled(trainer: Any, batch: Batch, fields: FieldTable) -> Batch:
    """The batch with the keys that this trainer's batches have on account of its sampler, which is taken to agree
    with the policy."""
    batch = dict(batch)
    if compat.keeps_sampler(trainer):
        batch.setdefault(compat.SAMPLING_LOGPS, batch[compat.OLD_LOGPS])
    if compat.corrects_sampler(trainer):
        logps = batch[compat.OLD_LOGPS]
        per_row = fields.spec(compat.IS_RATIO).layout == "row"
        ratios = logps[:, :1] if per_row else logps
        batch.setdefault(compat.IS_RATIO, torch.ones_like(ratios))
    return batch


def _batch(session: Session, offline: OfflineGroup, advantages: Floats) -> Batch:
    """A batch of one group, padded as TRL pads."""
    device = session.trainer.accelerator.device
    fields = session.components.fields
    pad = fields.pad_token_id
    prompts = offline.prompt_ids
    completions = offline.completion_ids
    prompt_mask = [np.ones_like(row) for row in prompts]
    completion_mask = [np.ones_like(row) for row in completions]
    batch: Batch = {
        "prompt_ids": _padded(prompts, pad, torch.int64, side="left"),
        "prompt_mask": _padded(prompt_mask, 0, torch.int64, side="left"),
        "completion_ids": _padded(completions, pad, torch.int64),
        "completion_mask": _padded(completion_mask, 0, torch.int64),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
    }
    for key, rows in offline.tokens.items():
        spec = fields.spec(key)
        is_float = spec.dtype in (None, "float32", "bfloat16")
        dtype = torch.float32 if is_float else torch.int64
        batch[key] = _padded(rows, fields.pad_value(spec), dtype)
    return {key: value.to(device) for key, value in batch.items()}


def _padded(rows: Sequence[NDArray[Any]], value: float, dtype: torch.dtype, side: str = "right") -> torch.Tensor:
    """`(rows, longest row)`, filled up with `value` on the right, or on the left."""
    tensors = [torch.from_numpy(row).to(dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def _advantages(session: Session, groups: Sequence[OfflineGroup]) -> list[Floats]:
    """The file's advantages; where it has none, TRL's normalization of the weighted sum of its rewards.

    A row that no function scored, or that is masked, does not count, and gets 0. With `scale_rewards="batch"` the
    deviation is taken over all groups of the file.
    """
    if not groups:
        return []
    totals = np.stack([_counted_rewards(group) for group in groups])  # (groups, G)
    with np.errstate(invalid="ignore"):  # of infinite rewards, which are refused
        centered = totals - mean_of_scored(totals)[:, None]
        divisor = _divisor(totals, compat.reward_setup(session.trainer).scale)
        computed = np.where(np.isnan(totals), 0.0, centered / divisor)
    advantages = []
    for group, of_group in zip(groups, computed, strict=True):
        given = of_group if group.advantages is None else group.advantages
        if ADVANTAGES in group.tokens:
            given = np.array([np.abs(row).mean() for row in group.tokens[ADVANTAGES]])
        advantages.append(np.where(group.masked, 0.0, given))
    return advantages


def _masked(session: Session, offline: OfflineGroup) -> Bools:
    """`(G,)`: rows that train nothing: those of the file, and those that failed, as of a group generated here."""
    unscored = np.isnan(weighted_rewards(offline.rewards, offline.weights))
    if unscored.all() or session.components.beside_the_tap:  # unknown rewards; a loss that masks no row
        return offline.masked
    return offline.masked | unscored


def _counted_rewards(group: OfflineGroup) -> Floats:
    """`(G,)`: weighted rewards; NaN for masked rows."""
    return np.where(group.masked, np.nan, weighted_rewards(group.rewards, group.weights))


def _divisor(totals: Floats, scale: str) -> Floats | float:
    """Return TRL's divisor of centered rewards, for `(groups, G)` of them; `(groups, 1)` if each group has its own."""
    if scale == "none":
        return 1.0
    if scale == "batch":
        totals = totals.reshape(1, -1)
    return bessel_std(totals)[:, None] + STD_EPSILON
