"""Fills the buffer with groups made elsewhere: read, grouped, tokenised, given log-probs, and offered."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from numpy.typing import NDArray

from .. import compat
from ..batch.compose import cut
from ..batch.group_view import describe
from ..buffer.candidates import fill_missing, trainable_sums, with_rewards
from ..compat import STD_EPSILON
from ..counters import Tally
from ..distributed.all_ranks import run_on_all_ranks
from ..errors import ConfigurationError, ReplayError
from ..fields import REWARD, REWARDS, FieldTable
from ..protocols import Division, division_of
from ..session import Session
from ..types import Batch, Floats, Group, Groups
from .export import PORTION
from .reader import OfflineGroup, read_groups, source_name

FROM_FILE, FROM_POLICY = 1, 2
"""Values of the table's column `origin`: whose log-probs a group made elsewhere has; 0 is a group generated here."""


@dataclass(slots=True)
class Made:
    """A group as the buffer takes it."""

    group: Group
    view: Groups
    origin: int


def begin(session: Session) -> None:
    """Fills the buffer from `replay_warm_start`, once in the life of a run."""
    path = session.config.replay_warm_start
    if path is not None and not session.carry.warmed:
        add(session, path, session.config.replay_warm_start_short)
        session.carry.warmed = True


def add(session: Session, source: Any, incomplete: str = "refuse") -> int:
    """What [`ReplayBuffer.add`] does."""
    if incomplete not in ("refuse", "resample"):
        raise ConfigurationError(f"incomplete={incomplete!r} can't be used: give 'refuse' or 'resample'.")
    division = division_of(session.scope)
    if division is None:
        raise ReplayError(f"How replay_scope={session.config.replay_scope!r} divides a buffer is not known.")
    tally = Tally()
    session.roll_call("add", "adding groups to its buffer")
    groups, advantages = _read(session, source, incomplete, tally)
    made: list[Made] = []
    for start in range(0, len(groups), PORTION):
        portion = slice(start, start + PORTION)
        made += _make(session, groups[portion], advantages[portion])
    known = [each for each in made if _has_finite_logps(each.group)]
    tally.refuse(len(made) - len(known), "a trainable token's log-prob is not finite")
    before = set(session.buffer.table.serial.tolist())
    run_on_all_ranks(lambda: _offer(session, known, division, tally), ReplayError)
    session.totals.add(tally, batches=0)
    added = set(session.buffer.table.serial.tolist()) - before
    if added:
        session.components.rate_limiter.prefilled()
    return len(added)


def _read(
    session: Session,
    source: Any,
    incomplete: str,
    tally: Tally,
) -> tuple[list[OfflineGroup], list[Floats]]:
    """The groups that can be used, and their advantages; the same ones on all processes.

    Raises:
        ReplayError: A process can't read them, or reads others.
    """
    groups: list[OfflineGroup] = []
    advantages: list[Floats] = []

    def read() -> str:
        found = read_groups(session, source, incomplete, tally)
        for group, values in zip(found, _advantages(session, found), strict=True):
            if not np.isfinite(values).all():
                tally.refuse(1, "an advantage is not finite")
            elif not np.ptp(values):
                tally.refuse(1, "its rewards do not differ")
            else:
                groups.append(group)
                advantages.append(values)
        return _digest(groups)

    digests = run_on_all_ranks(read, ReplayError)
    if len(set(digests)) > 1:
        raise ReplayError(
            f"The processes read different groups from {source_name(source)}: give all of them the same file or rows. "
            "Nothing was added."
        )
    return groups, advantages


def _digest(groups: Sequence[OfflineGroup]) -> str:
    """Tells the groups that one process read from those of another."""
    digest = hashlib.blake2b(digest_size=16)
    for group in groups:
        rows: list[NDArray[Any]] = [*group.prompt_ids, *group.completion_ids]
        for key in sorted(group.tokens):
            rows += group.tokens[key]
        digest.update(repr([len(row) for row in rows]).encode())
        for row in rows:
            digest.update(row.tobytes())
        digest.update(group.rewards.tobytes())
    return digest.hexdigest()


def _has_finite_logps(group: Group) -> bool:
    """Whether the policy's and the sampler's log-probs of all trainable tokens are known."""
    for key in (compat.OLD_LOGPS, compat.SAMPLING_LOGPS):
        if key in group.tensors and not np.isfinite(trainable_sums(group, key)).all():
            return False
    return True


def _offer(
    session: Session,
    made: Sequence[Made],
    division: Division,
    tally: Tally,
) -> None:
    rank = int(session.trainer.accelerator.process_index)
    ranks = session.components.processes
    if not division.one_buffer:
        made = made[rank::ranks]
    if not made:
        return
    buffer = session.buffer
    carry = session.carry
    serials = [carry.serial + number for number in range(len(made))]
    carry.serial += len(made)
    kept = session.decide.offer(
        Groups.concatenate(_alike([each.view for each in made])),
        serials,
        [each.group.nbytes for each in made],
        [each.group.keys for each in made],
        tally,
    )
    dealt = division.one_buffer and not division.replicated
    for number, (serial, each) in enumerate(zip(serials, made, strict=True)):
        if serial not in kept:
            continue
        row = buffer.table.serial == serial
        owner = number % ranks if dealt else rank
        buffer.table.writable("origin")[row] = each.origin
        buffer.table.writable("owner")[row] = owner
        if owner == rank:
            buffer.receive({serial: each.group})


def _alike(views: Sequence[Groups]) -> Sequence[Groups]:
    """The views as they are if all have the same reward functions, and else each with its one total."""
    first = views[0].reward_weights
    if all(np.array_equal(view.reward_weights, first) for view in views):
        return views
    return [replace(view, rewards=view.reward[:, :, None], reward_weights=np.ones(1)) for view in views]


def _make(
    session: Session,
    groups: Sequence[OfflineGroup],
    advantages: Sequence[Floats],
) -> list[Made]:
    """Groups as the buffer takes them: with log-probs, and the same bits on all processes."""
    batches: list[Batch] = []
    with_own = [compat.OLD_LOGPS in group.tokens for group in groups]

    def compute() -> None:
        for group, values in zip(groups, advantages, strict=True):
            batches.append(_with_logps(session.trainer, _batch(session, group, values)))

    run_on_all_ranks(compute, ReplayError)
    if session.components.processes > 1:
        _broadcast(batches)
    made = []
    for group, batch, own in zip(groups, batches, with_own, strict=True):
        made.append(_cut(session, group, batch, FROM_FILE if own else FROM_POLICY))
    return made


def _with_logps(trainer: Any, batch: Batch) -> Batch:
    """The batch with the policy's log-probs where the file has none, and the reference model's."""
    training = trainer.model.training
    trainer.model.eval()
    try:
        batch = compat.with_old_logps(trainer, batch)
        return compat.with_reference_logps(trainer, batch)
    finally:
        trainer.model.train(training)


def _broadcast(batches: Sequence[Batch]) -> None:
    """Gives all processes the first one's log-probs, in one message."""
    places = [(batch, key) for batch in batches for key in (compat.OLD_LOGPS, compat.REF_LOGPS) if key in batch]
    if not places:
        return
    flat = torch.cat([batch[key].flatten() for batch, key in places])
    sizes = [batch[key].numel() for batch, key in places]
    parts = torch.split(broadcast(flat), sizes)
    for (batch, key), part in zip(places, parts, strict=True):
        batch[key] = part.view_as(batch[key])


def _cut(
    session: Session,
    offline: OfflineGroup,
    batch: Batch,
    origin: int,
) -> Made:
    """One group, through the same cutting as a batch of TRL's."""
    fields = session.components.fields
    size = session.components.num_generations
    batch = _as_sampled(session.trainer, batch, fields)
    (group,) = cut(batch, fields, [slice(0, size)])
    fill_missing(group.tensors)
    if "tool_mask" not in batch:  # a mask of ones takes no room, and lets runs with tools take the group
        group = replace(group, keys=group.keys | {"tool_mask"})
    columns = describe(batch, 0, size, fields.pad_token_id)
    view = Groups(
        rewards=offline.rewards[None],
        reward_weights=offline.weights,
        advantages=columns["advantages"][None],
        lengths=columns["lengths"][None],
        trainable=columns["trainable"][None],
        items=columns["items"][None],
        dead=np.zeros(1, bool),
        step=np.array([session.update - 1]),  # so that it is old enough for the next batch
        prompt=columns["prompt"][:1],
        behaviour_logps=trainable_sums(group)[None],
    )
    kept = (offline.rewards, REWARDS) if offline.named else (view.reward[0], REWARD)
    return Made(with_rewards(group, *kept), view, origin)


def _as_sampled(trainer: Any, batch: Batch, fields: FieldTable) -> Batch:
    """The batch with the keys that this trainer's batches have on account of its sampler, which is taken to agree
    with the policy."""
    batch = dict(batch)
    if compat.keeps_sampler(trainer):
        batch.setdefault(compat.SAMPLING_LOGPS, batch[compat.OLD_LOGPS])
    if compat.corrects_sampler(trainer):
        logps = batch[compat.OLD_LOGPS]
        per_row = fields.spec(compat.IS_RATIO).layout == "row"
        batch.setdefault(compat.IS_RATIO, torch.ones_like(logps[:, :1] if per_row else logps))
    return batch


def _batch(session: Session, offline: OfflineGroup, advantages: Floats) -> Batch:
    """A batch of one group, padded as TRL pads."""
    device, fields = (
        session.trainer.accelerator.device,
        session.components.fields,
    )
    prompts, completions = offline.prompt_ids, offline.completion_ids
    widths = max(map(len, prompts)), max(map(len, completions))

    def padded(
        rows: Sequence[NDArray[Any]],
        width: int,
        value: float,
        dtype: torch.dtype,
        left: bool,
    ) -> Any:
        out = torch.full((len(rows), width), value, dtype=dtype)
        for row, values in enumerate(rows):
            place = slice(width - len(values), width) if left else slice(0, len(values))
            out[row, place] = torch.from_numpy(values).to(dtype)
        return out.to(device)

    pad = fields.pad_token_id
    batch: Batch = {
        "prompt_ids": padded(prompts, widths[0], pad, torch.int64, left=True),
        "prompt_mask": padded(
            [np.ones_like(row) for row in prompts],
            widths[0],
            0,
            torch.int64,
            left=True,
        ),
        "completion_ids": padded(completions, widths[1], pad, torch.int64, left=False),
        "completion_mask": padded(
            [np.ones_like(row) for row in completions],
            widths[1],
            0,
            torch.int64,
            left=False,
        ),
        "advantages": torch.tensor(advantages, dtype=torch.float32, device=device),
    }
    for key, rows in offline.tokens.items():
        spec = fields.spec(key)
        dtype = torch.float32 if spec.dtype in (None, "float32", "bfloat16") else torch.int64
        batch[key] = padded(rows, widths[1], fields.pad_value(spec), dtype, left=False)
    return batch


def _advantages(session: Session, found: Sequence[OfflineGroup]) -> list[Floats]:
    """The file's advantages; where it has none, TRL's normalisation of the weighted sum of its rewards.

    A row that no function scored does not count, and gets 0. With `scale_rewards="batch"` the deviation is taken over
    all groups of the file.
    """
    sums = [_totals(group) for group in found]
    scale = compat.reward_setup(session.trainer).scale
    everything = np.concatenate(sums) if sums else np.zeros(0)
    values = []
    for group, total in zip(found, sums, strict=True):
        scored = total[~np.isnan(total)]
        with np.errstate(invalid="ignore"):  # of infinite rewards, which are refused
            std = {"none": 1.0 - STD_EPSILON, "batch": _std(everything)}.get(scale, _std(total))
            computed = (total - (scored.mean() if len(scored) else 0.0)) / (std + STD_EPSILON)
        computed = np.where(np.isnan(total), 0.0, computed)
        values.append(computed if group.advantages is None else group.advantages)
    return values


def _totals(group: OfflineGroup) -> Floats:
    """`(G,)`: the weighted sum of each row's rewards; NaN where there is none."""
    unscored = np.isnan(group.rewards).all(axis=1)
    return np.where(unscored, np.nan, np.nansum(group.rewards * group.weights, axis=1))


def _std(values: Floats) -> float:
    """Bessel-corrected, without NaN; 0 with fewer than two values."""
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0
